# SPDX-License-Identifier: Apache-2.0
"""AdaGC in the place of Megatron's clipping."""
