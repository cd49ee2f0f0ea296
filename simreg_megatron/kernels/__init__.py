# SPDX-License-Identifier: Apache-2.0
"""Fast implementations of what `simreg_megatron.losses` defines; each is judged by the reference there."""
