# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's own training loop on the CPU: `python -m tests.te.bridge_run plain|simreg` trains a tiny LLaMA.

Two steps on its mock data, in one process, with Megatron's local layers. Bridge imports Transformer Engine without
asking whether it is needed, while the CPU backend hides it from Megatron, which would take its Adam and its norms
from there; so it is hidden until Megatron has chosen, and then Bridge imports the real one.
"""

import os
import socket
import sys
from typing import Any

from simreg_megatron import SimRegConfig, install
from simreg_megatron.cpu import backend as cpu_backend

STEPS, LENGTH, VOCABULARY = 2, 32, 256
CONFIG = SimRegConfig(lambda_=1, temperature=0.5, chunk_size=16)


def use_cpu() -> None:
    """The CPU backend, then Bridge's requirements in the only order in which all of them import."""
    cpu_backend.activate()
    import modelopt.torch.distill  # noqa: F401  (it registers Transformer Engine's layers where it finds any)

    del sys.modules["transformer_engine"]
    import transformer_engine.pytorch  # noqa: F401


def model_of() -> Any:
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return GPTModelProvider(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, seq_length=LENGTH,
        vocab_size=VOCABULARY, normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False,
        position_embedding_type="rope", share_embeddings_and_output_weights=False, hidden_dropout=0.0,
        attention_dropout=0.0, transformer_layer_spec=lambda config: get_gpt_layer_local_spec(normalization="RMSNorm"),
        use_cpu_initialization=True, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
        cross_entropy_loss_fusion=False, attention_backend=None,
    )  # fmt: skip


def settings() -> Any:
    """Bridge's ConfigContainer: everything that a GPU would be for is off, and nothing is saved."""
    from megatron.bridge.training import config
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    return config.ConfigContainer(
        model=model_of(),
        train=config.TrainingConfig(train_iters=STEPS, global_batch_size=2, micro_batch_size=1),
        validation=config.ValidationConfig(eval_interval=STEPS, eval_iters=0),
        optimizer=OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-3),
        scheduler=config.SchedulerConfig(
            lr_decay_iters=STEPS, lr_warmup_iters=0,
            start_weight_decay=0.1, end_weight_decay=0.1, weight_decay_incr_style="constant",
        ),
        ddp=DistributedDataParallelConfig(),
        dataset=config.MockGPTDatasetConfig(
            random_seed=1, seq_length=LENGTH, split="9,1,0", reset_attention_mask=False, reset_position_ids=False,
            eod_mask_loss=False, data_sharding=True, dataloader_type="single", num_workers=0,
        ),
        logger=config.LoggerConfig(log_interval=1),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
        checkpoint=config.CheckpointConfig(save=None, load=None),
        rng=config.RNGConfig(seed=1),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
    )  # fmt: skip


def alone() -> None:
    """The environment of a job of one process, at a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def main() -> None:
    alone()
    use_cpu()
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from simreg_megatron.loop.bridge import SimRegCallback

    callbacks = []
    if sys.argv[1] == "simreg":
        install(config=CONFIG)
        callbacks.append(SimRegCallback())
    pretrain(settings(), forward_step, callbacks=callbacks)


if __name__ == "__main__":
    main()
