# SPDX-License-Identifier: Apache-2.0
"""Keep Hugging Face's libraries from the network."""

from __future__ import annotations

import os


def go_offline() -> None:
    """Call it before transformers, datasets and huggingface_hub are imported: they read the environment then."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
