# SPDX-License-Identifier: Apache-2.0
"""SimReg in torchtitan: a loss that adds it to torchtitan's chunked cross-entropy.

    def llama3_8b_simreg():
        config = llama3_8b()
        config.loss = SimRegLoss.Config(loss_fn=config.loss.loss_fn, simreg_lambda=20)
        return config

torchtitan passes the final hidden states to its loss and, except in a pipeline, `positions`. SimReg's chunks are cut
from each row of packed documents. A micro-batch has B rows in release 0.3, and one in newer commits (seen: b5bcd76c).

Shapes: B rows of T tokens on this rank, D features; a single row may come without its axis, as [T, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import spmd_types
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.config import CompileConfig
from torchtitan.distributed.spmd_types import spmd_mesh_size
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.tools.logging import logger

from simreg_megatron.losses import simreg_loss, trial


class SimRegLoss(ChunkedLossWrapper):
    """Cross-entropy, and lambda * SimReg in its gradient: the loss that torchtitan logs is the cross-entropy alone.

    Both are sums over this rank's tokens, divided by the valid tokens of all ranks, so data-parallel ranks add up as
    they do for torchtitan's own loss. Tensor and context parallelism are refused.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        simreg_lambda: float = 10.0
        """Weight; the authors' rule is 10 * sqrt(width / 1024). 0 is torchtitan's own loss."""

        simreg_temperature: float = 0.01
        simreg_chunk_size: int = 1024
        """Tokens that are compared with each other: 2 or more; must divide the tokens of a row."""

        simreg_document_mask: bool = False
        """Compare tokens of one document only. Not with pipelines, which give the loss no positions."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        super().__init__(config, compile_config=compile_config)
        if config.simreg_lambda < 0:
            raise ValueError(f"simreg_lambda must be 0 or more, not {config.simreg_lambda}")
        self.config = config
        self._is_chosen = False

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return torchtitan's loss of hidden states [B, T, D], with SimReg in its gradient, and metrics."""
        loss, metrics = super().__call__(pred, labels, global_valid_tokens, **loss_inputs)
        if not pred.requires_grad or self.config.simreg_lambda == 0:  # validation measures cross-entropy alone
            return loss, metrics
        with spmd_types.no_typecheck():
            term = self._term(pred, labels, loss_inputs.get("positions"))
            if global_valid_tokens is not None:
                term = term / global_valid_tokens
            weighted = self.config.simreg_lambda * term
            return loss + (weighted - weighted.detach()), metrics | {"simreg/mean": term.detach()}

    def _term(self, hidden_states: Tensor, labels: Tensor, positions: Tensor | None) -> Tensor:
        """Sum of the terms of all tokens with a label, on this rank."""
        if labels.dim() == 1:
            hidden_states, labels = hidden_states.unsqueeze(0), labels.unsqueeze(0)
            positions = None if positions is None else positions.unsqueeze(0)
        config, (batch, tokens, width) = self.config, hidden_states.shape
        if get_spmd_backend() != "spmd_types" or spmd_mesh_size("cp") * spmd_mesh_size("tp") > 1:
            raise NotImplementedError(
                "SimReg in torchtitan expects parallelism.spmd_backend='spmd_types' without tensor or context "
                "parallelism: set both degrees to 1, or simreg_lambda to 0"
            )
        size, masks = config.simreg_chunk_size, config.simreg_document_mask
        if size < 2 or tokens % size:  # a row does not say where its sequences begin, so 0 cannot mean these
            raise ValueError(f"simreg_chunk_size {size} must be at least 2 and divide the {tokens} tokens of a row")
        if masks and positions is None:
            raise ValueError("simreg_document_mask needs positions, which a pipeline does not give the loss")
        documents = (positions == 0).cumsum(1) if masks and positions is not None else None
        if not self._is_chosen and hidden_states.is_cuda:
            shape = trial.Shape(batch, tokens, width, size, hidden_states.dtype, config.simreg_temperature)
            logger.info("SimReg: %s", trial.choose(shape, hidden_states.device))
        self._is_chosen = True
        return simreg_loss(
            hidden_states,
            labels,
            valid=labels != IGNORE_INDEX,
            documents=documents,
            temperature=config.simreg_temperature,
            chunk_size=size,
            reduction="sum",
        )
