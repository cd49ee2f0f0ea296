# SPDX-License-Identifier: Apache-2.0
"""The parent of ranks with Transformer Engine: Megatron that has imported the real one, without our stand-ins.

The four questions that making, saving and loading models asks CUDA are answered here.
"""

import importlib
import os
from types import SimpleNamespace

import torch

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron's parser demands it under tensor parallelism
for module in ("transformer_engine.pytorch", "megatron.training.training", "simreg_megatron.plugin.hooks"):
    importlib.import_module(module)
torch.cuda.is_available = lambda: True
torch.cuda.get_device_properties = lambda device: SimpleNamespace(major=9, minor=0)
torch.cuda.synchronize = lambda: None
torch.cuda.current_device = lambda: torch.device("cpu")
