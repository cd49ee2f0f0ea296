# SPDX-License-Identifier: Apache-2.0
"""All flags of ours times the flags of Megatron that meet them: a step runs, or one sentence refuses."""
