# SPDX-License-Identifier: Apache-2.0
"""One process that allows TensorFloat-32: `python -m tests.gpu.tf32 IMPL [--setting] [--device cuda]` prints errors,
relative to float64, of a plain product and of SimReg's loss and gradient. The environment or --setting allows it."""

import argparse
import json

import torch
from torch import Tensor

from simreg_megatron.losses import simreg_loss


def tokens(length: int, width: int, dtype: torch.dtype, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Hidden states of which SimReg is some 1e-7 at tau 0.01, as late in training."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 200, (2, length), generator=generator)
    centres = torch.randn(200, width, generator=generator) + 2.2
    rows = centres[labels] + 0.6 * torch.randn(2, length, width, generator=generator)
    return rows.to(device, dtype), labels.to(device)


def apart(one: Tensor, other: Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def errors(impl: str, device: str) -> dict[str, float]:
    rows, labels = tokens(1024, 1024, torch.float32, device)
    found = []
    for given, form in ((rows, impl), (rows.double(), "reference")):
        leaf = given.detach().requires_grad_()
        loss = simreg_loss(leaf, labels, impl=form)
        (loss * 2.0**20).backward()
        found.append((loss.detach(), leaf.grad))
    loss, gradient = (apart(ours, true) for ours, true in zip(*found, strict=True))
    plain = apart(rows[0] @ rows[0].mT, rows[0].double() @ rows[0].double().mT)
    return {"plain": plain, "loss": loss, "gradient": gradient}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("impl")
    parser.add_argument("--setting", action="store_true")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.setting:
        torch.backends.cuda.matmul.allow_tf32 = True
    print(json.dumps(errors(options.impl, options.device)))


if __name__ == "__main__":
    main()
