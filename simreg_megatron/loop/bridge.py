# SPDX-License-Identifier: Apache-2.0
"""SimReg in Megatron-Bridge, whose training loop is its own: a callback passes on the iteration and logs the means.

    install(config=SimRegConfig(lambda_=10))
    pretrain(config, forward_step, callbacks=[SimRegCallback()])

Without it SimReg still trains, but its values are not logged, and a schedule of lambda is an error at the first step.
The events are those of Megatron-Bridge 0.6: `context.state.train_state.step`, `.cfg.logger.log_interval`,
`.cfg.train.train_iters`, `.tensorboard_logger`, `.wandb_logger`, and `context.model`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from simreg_megatron import loop
from simreg_megatron.plugin.log import write_scalars
from simreg_megatron.plugin.loop import begin_run  # that of `loop` takes no log interval


class SimRegCallback:
    """Callback for `pretrain(..., callbacks=[SimRegCallback()])`, after `install(config=...)`."""

    def on_train_start(self, context: Any) -> None:
        """Check that SimReg supports the models, and log its settings; call `install(config=...)` before."""
        settings = context.state.cfg
        begin_run(
            context.model,
            micro_batch_size=getattr(settings.train, "micro_batch_size", None),
            seq_length=getattr(getattr(settings, "model", None), "seq_length", None),
        )

    def on_train_step_start(self, context: Any) -> None:
        """Pass on the iteration: lambda may change with it, and the geometry is measured at log steps alone."""
        iteration = int(context.state.train_state.step)
        length = context.state.cfg.train.train_iters
        loop.begin_step(iteration, measures=self._logs(context, iteration + 1), num_iterations=length)

    def on_train_step_end(self, context: Any) -> None:
        """Log means of the interval; a collective, so every rank calls it at the same steps."""
        iteration = int(context.state.train_state.step) + 1  # Bridge counts the step after its callbacks
        means = loop.end_step(context.model, reduces=self._logs(context, iteration))
        if not means or dist.get_rank() != dist.get_world_size() - 1:
            return
        print(f" iteration {iteration:8d} | " + " | ".join(f"{name}: {float(means[name]):.6E}" for name in means))
        write_scalars(means, iteration, (context.state.tensorboard_logger, context.state.wandb_logger))

    def _logs(self, context: Any, iteration: int) -> bool:
        interval = loop.settings().log_interval or context.state.cfg.logger.log_interval
        return bool(iteration % interval == 0)
