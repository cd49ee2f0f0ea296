# SPDX-License-Identifier: Apache-2.0
"""Train K small LLaMAs of one shape at once on one device: every weight has a leading axis of models.

    loss of a model = cross-entropy + lam * mean SimReg term + z * mean logsumexp^2

The losses are summed, so gradients never mix. Gradient norm, clipping, rate and AdamW are each model's own. On a GPU
products are in bfloat16 over float32 weights, on a CPU all is in float32. No step waits for the device.

Shapes: K models, B sequences of S tokens, N = B S, width d, F of SwiGLU, vocabulary V.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from simreg_megatron.contrib.placebo import permuted_labels
from simreg_megatron.losses import simreg_loss
from simreg_megatron.tools.tokens import read_tokens

LOGITS = {"cpu": 32 << 20, "cuda": 1 << 30}  # bytes of logits that exist at once
BETA1, BETA2, EPSILON, CLIP = 0.9, 0.95, 1e-8, 1.0
POINTS = 25  # of a training curve


@dataclass(frozen=True)
class Shape:
    """Sizes that all models of a stack share."""

    width: int
    layers: int
    sequence: int
    batch: int
    vocabulary: int

    @property
    def head(self) -> int:
        return 64 if self.width > 64 else 32

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight, in the order in which initial values are drawn."""
        d, f = self.width, -(-8 * self.width // 3 // 16) * 16
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocabulary, d), "head": (self.vocabulary, d)}
        for layer in range(self.layers):
            shapes |= {f"qkv{layer}": (d, 3 * d), f"o{layer}": (d, d), f"up{layer}": (d, 2 * f), f"down{layer}": (f, d)}
        return shapes | {"norms": (2 * self.layers + 1, d)}


@dataclass(frozen=True)
class Run:
    """Settings of one model.

    Attributes:
        std: standard deviation of the initial weights; those that add to the residual have std / sqrt(2 layers).
        warm: share of the steps in which the rate rises; it then falls to a tenth along a cosine.
        labels: of SimReg: "right", "permuted" in each chunk, or "self", where a token is positive to itself alone.
        off_after: share of the steps after which SimReg ends.
    """

    seed: int
    lr: float
    std: float
    warm: float
    lam: float = 0.0
    chunk: int = 0
    labels: str = "none"
    off_after: float = 1.0
    z: float = 0.0
    wd: float = 0.1


class Data:
    """Token ids of the training and the validation text, on the device."""

    def __init__(self, train: np.ndarray, valid: np.ndarray, device: str) -> None:
        self.train, self.valid = (torch.from_numpy(part.astype(np.int32)).to(device) for part in (train, valid))
        self.device = torch.device(device)

    @classmethod
    def of(cls, folder: Path, device: str) -> Data:
        return cls(read_tokens(folder / "train"), read_tokens(folder / "valid"), device)

    def order(self, seed: int, steps: int, shape: Shape) -> Tensor:
        """Draw the training sequences of each step [steps, B]: all in one order, then all in another."""
        number, needed, epochs = (len(self.train) - 1) // shape.sequence, steps * shape.batch, []
        for epoch in range(-(-needed // number)):
            epochs.append(np.random.default_rng([seed, epoch] if epoch else seed).permutation(number))
        return torch.from_numpy(np.concatenate(epochs)[:needed].reshape(steps, shape.batch))


def sequences(tokens: Tensor, numbers: Tensor, length: int) -> Tensor:
    """Cut the sequences of these numbers, each with the token that follows: [..., S + 1] int64."""
    return tokens[numbers[..., None] * length + torch.arange(length + 1, device=tokens.device)].long()


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function on a GPU, where each of its operations would be a pass over memory."""
    compiled = functools.cache(lambda: torch.compile(function))

    def called(first: Tensor, *others: Tensor) -> Any:
        return (compiled() if first.is_cuda else function)(first, *others)

    return functools.wraps(function)(called)


@fused
def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)


@fused
def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to [..., S, heads, head]; cos and sin are [S, 1, head / 2]."""
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


@fused
def swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


@fused
def softmax_gradient_(logits: Tensor, labels: Tensor, z: Tensor) -> Tensor:
    """Turn logits [K, n, V] in place into the gradient of CE + z logsumexp^2; return the cross-entropy CE [K, n]."""
    x, labels = logits.float(), labels[..., None]
    total, right = x.logsumexp(-1, keepdim=True), x.gather(-1, labels)
    is_right = labels == torch.arange(x.shape[-1], device=x.device)
    logits.copy_((x - total).exp() * (1 + 2 * z[:, None, None] * total) - is_right.float())
    return (total - right)[..., 0]


def cross_entropy(h: Tensor, weight: Tensor, labels: Tensor, z: Tensor, *, back: bool = False) -> tuple[Tensor, ...]:
    """Compute the head in blocks of tokens, so that the logits of all models never exist at once.

    Returns:
        Cross-entropy [K]; with `back` also the gradients of cross-entropy + z-loss for h and for the weight.
    """
    (models, number, _), low = h.shape, weight.to(h.dtype)
    fit = max(1, LOGITS[h.device.type] // (models * weight.shape[1] * h.element_size()))
    rows, loss = 1 << fit.bit_length() - 1, torch.zeros_like(z)
    of_h, of_weight = (torch.zeros_like(each) for each in ((h, weight) if back else (z, z)))
    for start in range(0, number, rows):
        part = slice(start, start + rows)
        logits = torch.bmm(h[:, part], low.mT)
        loss += softmax_gradient_(logits, labels[:, part], z).sum(1)
        if back:
            of_h[:, part] = torch.bmm(logits, low)
            if logits.dtype == of_weight.dtype:
                of_weight.baddbmm_(logits.mT, h[:, part])
            else:  # bfloat16 times bfloat16, summed in float32
                torch.baddbmm(of_weight, logits.mT, h[:, part], out_dtype=of_weight.dtype, out=of_weight)
    return loss / number, of_h.div_(number), of_weight.div_(number)


@functools.lru_cache(maxsize=2)
def unit_weights(shape: Shape, seed: int) -> dict[str, Tensor]:
    """Draw normal weights: the same on every device, and for all runs of a seed."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator) for name, size in shape.sizes().items()}


class Stack:
    """Models of one shape that are trained for the same number of steps, each by its own Run."""

    def __init__(self, shape: Shape, runs: list[Run], steps: int, data: Data) -> None:
        on_gpu, device = data.device.type == "cuda", data.device
        self.shape, self.runs, self.steps, self.data = shape, runs, steps, data
        self.dtype, self.impl = (torch.bfloat16, "triton") if on_gpu else (torch.float32, "tiled")
        if on_gpu:  # sums in float32; and no attention of cuDNN, which is planned for each shape
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.enable_cudnn_sdp(False)
            torch._dynamo.config.recompile_limit = 64  # `fused` functions are compiled for each shape and grad mode
        values = torch.tensor([(run.lam, run.z, run.wd) for run in runs], device=device)
        self.lam, self.z, self.wd = (part.contiguous() for part in values.unbind(1))
        self.rates = torch.tensor([[self.rate(run, step) for run in runs] for step in range(steps)], device=device)
        self.order = torch.stack([data.order(run.seed, steps, shape) for run in runs], 1).to(device)  # [steps, K, B]
        self.weights = {name: torch.empty(len(runs), *size, device=device) for name, size in shape.sizes().items()}
        for k, run in enumerate(runs):
            for name, unit in unit_weights(shape, run.seed).items():
                scale = math.sqrt(2 * shape.layers) if name.startswith(("o", "down")) else 1.0
                self.weights[name][k] = unit * (run.std / scale)
        self.weights["norms"].fill_(1.0)
        self.moments = {name: (torch.zeros_like(each), torch.zeros_like(each)) for name, each in self.weights.items()}
        for weight in self.weights.values():
            weight.requires_grad_()
        self.offset = shape.vocabulary * torch.arange(len(runs), device=device)[:, None, None]
        frequencies = 1 / 10000 ** (torch.arange(0, shape.head, 2) / shape.head)
        angles = torch.outer(torch.arange(shape.sequence).float(), frequencies)[:, None]
        self.cos, self.sin = angles.cos().to(device, self.dtype), angles.sin().to(device, self.dtype)
        self.bad_steps = torch.zeros(len(runs), device=device)

    def rate(self, run: Run, step: int) -> float:
        warm = max(1, round(run.warm * self.steps))
        if step <= warm:
            return run.lr * step / warm
        return run.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / (self.steps - warm))))

    def states(self, tokens: Tensor) -> Tensor:
        """Compute final hidden states [K, N, d] of tokens [K, B, S]; a norm's weights join the product after it."""
        (models, batch, length), w, d = tokens.shape, self.weights, self.shape.width
        norms = w["norms"].unbind(1)

        def product(norm: int, name: str) -> Tensor:
            return torch.bmm(rms_norm(x), (norms[norm][..., None] * w[name]).to(self.dtype))

        x = F.embedding(tokens + self.offset, w["embedding"].view(-1, d)).to(self.dtype).view(models, -1, d)
        for layer in range(self.shape.layers):
            qkv = product(2 * layer, f"qkv{layer}").view(models * batch, length, 3, -1, self.shape.head)
            q, k, v = qkv.unbind(2)
            q, k = (rotated(each, self.cos[:length], self.sin[:length]) for each in (q, k))
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = torch.baddbmm(x, mixed.transpose(1, 2).reshape(x.shape), w[f"o{layer}"].to(self.dtype))
            x = torch.baddbmm(x, swiglu(product(2 * layer + 1, f"up{layer}")), w[f"down{layer}"].to(self.dtype))
        return rms_norm(x) * norms[-1][:, None].to(self.dtype)

    def terms(self, step: int, h: Tensor, labels: Tensor) -> list[Tensor]:
        """Sum lam * mean SimReg term over the models that have it in this step, for each length of chunk."""
        (batch, length), states, terms = labels.shape[1:], h.unbind(), []
        active = [k for k, run in enumerate(self.runs) if run.lam and step < run.off_after * self.steps]
        places = torch.arange(length, device=h.device)[None]
        for chunk in sorted({self.runs[k].chunk for k in active}):
            models, longest = [k for k in active if self.runs[k].chunk == chunk], min(chunk or length, length)
            usable = torch.ones_like(places, dtype=torch.bool)
            moved = permuted_labels(places, usable, chunk_size=chunk, longest=longest, seed=0, iteration=step)[0]
            chosen = {"right": labels, "permuted": labels[..., moved], "self": places.expand_as(labels)}
            rows = torch.cat([states[k].view(batch, length, -1) for k in models])
            own = torch.cat([chosen[self.runs[k].labels][k] for k in models])
            term = self.simreg(rows, own, chunk).view(len(models), -1).mean(1)
            terms.append((torch.stack([self.lam[k] for k in models]) * term).sum())
        return terms

    def simreg(self, rows: Tensor, labels: Tensor, chunk: int) -> Tensor:
        return simreg_loss(rows, labels, temperature=0.01, chunk_size=chunk, reduction="none", impl=self.impl)

    def step(self, step: int) -> Tensor:
        """Train all models for one step; return their cross-entropy [K]."""
        tokens, head = sequences(self.data.train, self.order[step], self.shape.sequence), self.weights["head"]
        labels, h = tokens[..., 1:].contiguous(), self.states(tokens[..., :-1])
        loss, of_h, head.grad = cross_entropy(h.detach(), head.detach(), labels.flatten(1), self.z, back=True)
        terms = self.terms(step, h, labels)
        torch.autograd.backward([h, *terms], [of_h, *map(torch.ones_like, terms)])
        self.update(step)
        return loss

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Apply AdamW with a rate and a clipped gradient for each model; weights stay where it is not finite."""
        norm = sum(weight.grad.flatten(1).square().sum(1) for weight in self.weights.values()).sqrt()  # type: ignore
        fine = norm.isfinite()
        self.bad_steps += ~fine
        scale, rate = (CLIP / (norm + 1e-6)).clamp(max=1), torch.where(fine, self.rates[step], 0.0)
        first, second = 1 - BETA1 ** (step + 1), math.sqrt(1 - BETA2 ** (step + 1))
        for name, weight in self.weights.items():
            own, (mean, square) = (-1, *[1] * (weight.ndim - 1)), self.moments[name]
            grad, weight.grad = weight.grad, None
            grad = grad.mul_(scale.view(own)).masked_fill_(~fine.view(own), 0.0)  # type: ignore
            mean.lerp_(grad, 1 - BETA1)
            square.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
            if name != "norms":
                weight.mul_(1 - (rate * self.wd).view(own))
            torch.sqrt(square, out=grad).add_(EPSILON * second)
            weight.addcmul_(mean / grad, (rate * (-second / first)).view(own))

    @torch.no_grad()
    def validate(self, most: int | None = None) -> Tensor:
        """Compute the mean cross-entropy [K] of all sequences of the validation text, or of the first `most`."""
        numbers = torch.arange((len(self.data.valid) - 1) // self.shape.sequence, device=self.data.device)[:most]
        total = torch.zeros_like(self.lam)
        for part in numbers.split(self.shape.batch):
            tokens = sequences(self.data.valid, part, self.shape.sequence).expand(len(self.runs), -1, -1)
            h, labels = self.states(tokens[..., :-1]), tokens[..., 1:].flatten(1)
            total += len(part) * cross_entropy(h, self.weights["head"], labels, self.z)[0]
        return total / len(numbers)

    @torch.no_grad()
    def geometry(self, tokens: int = 4096) -> tuple[Tensor, Tensor]:
        """Compute the mean cosine of different validation tokens and SimReg's term in chunks of at most 1024."""
        length = self.shape.sequence
        numbers = torch.arange(max(1, min(tokens, len(self.data.valid) - 1) // length), device=self.data.device)
        seen = sequences(self.data.valid, numbers, length).expand(len(self.runs), -1, -1)
        h = self.states(seen[..., :-1])
        unit, number = F.normalize(h.float(), dim=-1), h.shape[1]
        cosine = (unit.sum(1).square().sum(-1) - number) / (number * (number - 1))
        rows, labels, chunk = h.view(-1, length, h.shape[-1]), seen[..., 1:].flatten(0, 1), min(1024, length)
        return cosine, self.simreg(rows, labels, chunk).view(len(self.runs), -1).mean(1)


def train(stack: Stack, left: Callable[[], float], most: int | None = None) -> list[dict[str, Any]]:
    """Train all steps and return a row for each run; none if the time of steps 5 to 12 shows that `left` is too short.

    A row has the points of the training curve under their numbers. A validation batch takes 0.4 of a step, and the
    functions that only the end of the run calls take 15 s to compile.
    """

    def now() -> float:
        return time.monotonic() + 0 * stack.bad_steps.sum().item()  # waits for the device

    shape, device, steps, count = stack.shape, stack.data.device, stack.steps, len(stack.runs)
    points = {max(1, round(steps * j / POINTS)) for j in range(1, POINTS + 1)}
    began, batches = now(), (len(stack.data.valid) - 1) / shape.sequence / shape.batch
    curve, losses, fifth = [], [], began
    for step in range(steps):
        losses.append(stack.step(step))
        if step == 3:
            fifth = now()
        if step == 11:
            needed = (now() - fifth) / 8 * (steps - 12 + 0.4 * batches) + 15 * (device.type == "cuda")
            print(f"  {steps} steps of {count} models: {needed:.0f} s, {left():.0f} s are left", flush=True)
            if needed > left():
                return []
        if step + 1 in points:
            curve.append(torch.stack(losses).mean(0))
            losses = []
    speed = steps * count * shape.batch * shape.sequence / (now() - began)
    (cosine, term), valid = stack.geometry(), stack.validate(most)
    shared = {
        **asdict(shape), "steps": steps, "models": count, "dtype": str(stack.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__,
        "tokens_per_second": round(speed), "seconds": round(now() - began, 1),
    }  # fmt: skip
    names = ("valid", "cosine", "term", "bad_steps", "train", *map(str, range(1, POINTS + 1)))
    numbers = torch.stack([valid, cosine, term, stack.bad_steps, curve[-1], *curve], 1).tolist()
    return [asdict(run) | shared | {name: float(f"{value:.6g}") for name, value in zip(names, own, strict=False)}
            for run, own in zip(stack.runs, numbers, strict=True)]  # fmt: skip
