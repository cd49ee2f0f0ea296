# SPDX-License-Identifier: Apache-2.0
"""Return whether torch is older than 2.8, which Megatron's tests and the form in Triton need."""

import torch

OLD_TORCH = "dtype" not in torch.ops.aten.bmm.overloads()
