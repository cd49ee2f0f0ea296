# SPDX-License-Identifier: Apache-2.0
"""Calls of Megatron's model by ms-swift, slime and verl, rebuilt: SimReg is in the gradient, or an error says no.

The model is Megatron's own, on the CPU; around it stands what each framework's published code does between the batch
and the loss. The files that docs/ecosystem.md gives to ms-swift and slime are run from the page. Sources:

    ms-swift 3602360a562313afbf2ef6065fdf61f271a2c5b9   swift/megatron/trainers/{base,trainer}.py, callbacks/base.py
    mcore-bridge 1.6.5                                  mcore_bridge/model/gpt_model.py
    slime 624b824a898ab0ec1fcb4d373004c7f3852bf515      slime/backends/megatron_utils/{model,loss,data}.py
    verl 1dda039b9c6311889a9c9a26040677e1254814f9       verl/models/mcore/{model_forward*,mtp_patch}.py

Shapes: T tokens of a packed row, V words, D features.
"""

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from simreg_megatron import SimRegConfig, install, uninstall
from simreg_megatron.losses import simreg_loss
from tests.helpers.pages import ROOT, blocks
from tests.megatron import forks, runs
from tests.megatron.own_script import VOCABULARY, WIDTH, build_model, start

LENGTHS = (20, 28)  # of the samples that a row packs
TOTAL = sum(LENGTHS)
CONFIG = SimRegConfig(lambda_=10)
UNLABELLED = "trains without labels, so its loss is computed elsewhere"
BYPASSED = "ended a training forward pass without calling the function that SimReg wraps.*_postprocess: make the"
Gradients = dict[str, Tensor]

CONTRACTS: list[str] = []
ON_TWO_RANKS = ("slime_gathers_what_sequence_parallelism_splits",)


def contract(check: Callable[[], None]) -> Callable[[], None]:
    CONTRACTS.append(check.__name__)
    return check


# ---- what all of them have in common -------------------------------------------------------------------------------


def build(model_class: type | None = None, **others: Any) -> Any:
    return build_model(model_class, TOTAL, "rope", **others)


def row() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [1, T]; the label of each, -100 where its sample ends; and which sample it is of."""
    tokens = torch.randint(0, 8, (1, TOTAL), generator=torch.Generator().manual_seed(4))
    samples = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    labels = tokens.roll(-1, dims=1)
    labels[:, torch.tensor(LENGTHS).cumsum(0) - 1] = -100
    return tokens, labels, samples


def causal() -> Tensor:
    return torch.ones(TOTAL, TOTAL).triu(1).bool()[None, None]


def gradients(model: Any, loss: Tensor) -> Gradients:
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


class Sought(NamedTuple):
    """Values and gradients of share * (language-model loss + 10 * SimReg), written out."""

    loss: Tensor
    simreg: Tensor
    without: Gradients  # SimReg
    gradients: Gradients


def sought(model: Any, counted: Tensor, share: Tensor | float = 1.0) -> Sought:
    """Compute them over the tokens [1, T] whose label in `counted` is not -100, without SimReg's hooks."""
    found = []
    for weight in (0.0, 10.0):
        hidden, losses = _states_and_losses(model, counted.clamp(min=0))
        loss = share * (losses * (counted >= 0)).sum()
        terms = simreg_loss(hidden, counted, documents=row()[2], temperature=0.01, reduction="sum")
        simreg = share * terms
        found.append(gradients(model, loss + weight * simreg))
    return Sought(loss.detach(), simreg.detach(), *found)


def _states_and_losses(model: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """[1, T, D] that the decoder returns, and the cross-entropy [1, T] of the logits."""
    from megatron.core.models.gpt import GPTModel

    caught: list[Tensor] = []
    handle = model.decoder.register_forward_hook(lambda module, inputs, output: caught.append(output))
    logits = GPTModel.forward(model, row()[0], None, causal())
    handle.remove()
    return caught[0].transpose(0, 1), torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="none")[None]


def assert_same(found: Gradients, wanted: Sought) -> None:
    """At temperature 0.01 a cosine's rounding shows in single elements: each weight is judged by its norm."""
    assert found.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name
        assert name.startswith("output_layer") or (wanted.without[name] - gradient).norm() > 0.1 * gradient.norm(), name


def file_of(framework: str, **modules: dict[str, Any]) -> dict[str, Any]:
    """The names of the page's file for a framework, whose modules are these."""
    for path, names in modules.items():
        module = ModuleType(path.replace("__", "."))
        vars(module).update(names)
        sys.modules[module.__name__] = module
    found = [block for block in blocks(ROOT / "docs/ecosystem.md") if framework in block.text.partition("\n\n")[0]]
    (block,) = [block for block in found if block.language == "python"]
    names: dict[str, Any] = {}
    exec(compile(block.text, framework, "exec"), names)
    return names


def ask(models: list[Any], forward_backward: Callable[[], Any]) -> None:
    """The page's function."""
    file_of("simreg_megatron.loop.contract")["ask"](models, forward_backward)


# ---- ms-swift ------------------------------------------------------------------------------------------------------


def bridge_model() -> type:
    """mcore-bridge's GPTModel: both methods are its own, and neither calls Megatron's."""
    from megatron.core.models.gpt import GPTModel

    class BridgeModel(GPTModel):
        def forward(self, input_ids, position_ids, attention_mask=None, labels=None, packed_seq_params=None, **kwargs):
            decoder_input, rotary, *_ = self._preprocess(input_ids=input_ids, position_ids=position_ids)
            hidden_states = self.decoder(hidden_states=decoder_input, attention_mask=causal(), rotary_pos_emb=rotary)
            return self._postprocess(
                hidden_states=hidden_states, input_ids=input_ids, position_ids=position_ids, labels=labels,
                rotary_pos_emb=rotary, rotary_pos_cos=None, rotary_pos_sin=None, packed_seq_params=packed_seq_params,
            )  # fmt: skip

        def _postprocess(
            self, hidden_states, input_ids, position_ids, labels, rotary_pos_emb, rotary_pos_cos, rotary_pos_sin,
            loss_mask=None, packed_seq_params=None, inference_context=None, **kwargs,
        ):  # fmt: skip
            logits, _ = self.output_layer(hidden_states)
            if labels is None:
                return logits.transpose(0, 1).contiguous()
            return self.compute_language_model_loss(labels, logits)

    return BridgeModel


class Callback:
    """swift/megatron/callbacks/base.py"""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.args, self.state = trainer, trainer.args, trainer.state


class SwiftTrainer:
    """swift/megatron/trainers: `MegatronTrainer.forward_step` and `loss_func`, and the events of `run_train_step`."""

    def __init__(self, model: Any, callbacks: dict[str, type], **args: Any) -> None:
        self.args = SimpleNamespace(**{"rlhf_type": None, "train_iters": 2, "logging_steps": 2} | args)
        self.state = SimpleNamespace(iteration=0)
        self.unwrapped_models = [model]
        self.callback = callbacks["simreg"](self)
        self.logged: list[dict[str, Any]] = []

    def train(self, batch: dict[str, Any]) -> tuple[Tensor, Gradients]:
        (model,) = self.unwrapped_models
        self.callback.on_train_begin()
        while self.state.iteration < self.args.train_iters:
            self.callback.on_step_begin()
            labels = batch.get("labels")
            losses = model(**batch).float()
            mask = torch.ones(1) if labels is None else labels != -100
            loss = (losses * mask).sum() / mask.sum()
            found = gradients(model, loss)
            self.state.iteration += 1
            self.callback.on_step_end()
            if self.state.iteration == 1 or self.state.iteration % self.args.logging_steps == 0:
                self.logged.append({"loss": loss.item()})
                self.callback.on_log(logs=self.logged[-1])
        return loss.detach(), found


def swift_file(model_class: type) -> dict[str, type]:
    callbacks: dict[str, type] = {}
    swift = {"MegatronCallback": Callback, "megatron_callbacks_map": callbacks}
    file_of(
        "mcore_bridge", mcore_bridge={}, mcore_bridge__model={"GPTModel": model_class}, swift={}, swift__megatron={},
        swift__megatron__callbacks=swift,
    )  # fmt: skip
    return callbacks


def swift_batch() -> dict[str, Any]:
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens, labels, _ = row()
    ends = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0).int()
    packed = PackedSeqParams(cu_seqlens_q=ends, cu_seqlens_kv=ends, qkv_format="thd")
    return {"input_ids": tokens, "position_ids": None, "labels": labels, "packed_seq_params": packed}


@contract
def swift_trains_with_simreg() -> None:
    model = build(model_class := bridge_model())
    _, labels, _ = row()
    wanted = sought(model, labels, share=1 / (labels >= 0).sum())
    trainer = SwiftTrainer(model, swift_file(model_class))
    loss, found = trainer.train(swift_batch())
    assert_same(found, wanted)
    torch.testing.assert_close(loss, wanted.loss)
    assert len(trainer.logged) == 2
    for logs in trainer.logged:
        assert logs["simreg loss"] == pytest.approx(wanted.simreg.item(), rel=1e-4)
        assert "simreg positive cosine" in logs


@contract
def swift_with_install_alone_is_an_error() -> None:
    install(config=CONFIG)
    model = build(bridge_model())
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=BYPASSED):
            model(**swift_batch())
    with torch.no_grad():
        model(**swift_batch())
    model.eval()(**swift_batch())


@contract
def a_class_that_calls_megatrons_and_is_wrapped_twice_gets_one_term() -> None:
    from megatron.core.models.gpt import GPTModel

    from simreg_megatron.loop import wrap_model
    from simreg_megatron.plugin import model as model_wrappers

    class Calls(GPTModel):
        def _postprocess(self, hidden_states, labels, loss_mask=None, **given):
            return super()._postprocess(hidden_states=hidden_states, labels=labels, loss_mask=loss_mask, **given)

    model, plain = build(Calls), vars(Calls)["_postprocess"]
    labels = row()[1].clamp(min=0)
    wanted = sought(model, labels)
    install(config=SimRegConfig(lambda_=10, document_mask=False))
    alone = gradients(model, model(row()[0], None, causal(), labels=labels).sum())
    wrap_model(Calls)
    wrap_model(Calls)
    inner = Calls._postprocess
    Calls._postprocess = functools.wraps(inner)(lambda *args, **given: model_wrappers.regularize(inner, *args, **given))
    both = gradients(model, model(row()[0], None, causal(), labels=labels).sum())
    assert all(torch.equal(alone[name], both[name]) for name in alone)
    assert not torch.allclose(both["decoder.final_layernorm.weight"], wanted.without["decoder.final_layernorm.weight"])
    kept, Calls._postprocess = Calls._postprocess, Calls._postprocess.__wrapped__
    uninstall()
    assert vars(Calls)["_postprocess"] is plain and not model._forward_hooks
    Calls._postprocess = kept
    after = gradients(model, model(row()[0], None, causal(), labels=labels).sum())
    assert all(torch.allclose(after[name], wanted.without[name], rtol=1e-5, atol=1e-6) for name in after)


@contract
def a_class_of_its_own_that_is_wrapped_is_known() -> None:
    """A class of its own, not a subclass of GPTModel: a wrapper of it can log and check, too."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt import GPTModel

    from simreg_megatron.loop import begin_run, wrap_model
    from simreg_megatron.loop.contract import ContractError, check

    class Own(LanguageModule):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(config=arguments[0])
            made = GPTModel(*arguments, **settings)
            self.embedding, self.decoder, self.output_layer = made.embedding, made.decoder, made.output_layer
            self.post_process, self.prepared = True, made._preprocess
            self.register_buffer("steps", torch.zeros(()))  # changes in each, as the biases of experts may

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            decoder_input, rotary, *_ = self.prepared(input_ids=tokens, position_ids=None)
            hidden_states = self.decoder(hidden_states=decoder_input, attention_mask=causal(), rotary_pos_emb=rotary)
            return self._postprocess(hidden_states, labels)

        def _postprocess(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
            return self.compute_language_model_loss(labels, self.output_layer(hidden_states * self.steps.add_(1))[0])

    install(config=CONFIG)
    model = build(Own)
    with pytest.raises(NotImplementedError, match=r"supports only .*, and this run builds Own"):
        begin_run(model)
    wrap_model(Own)

    def step() -> list[dict[str, Tensor]]:
        loss = model(row()[0], row()[1].clamp(min=0)).sum()
        loss.backward()
        return [{"lm loss": torch.stack([loss.detach(), torch.ones(())])}]

    assert check(model, step).change > 0.1 and model.steps == 0
    with pytest.raises(ContractError, match="the loop reports nan without SimReg, so nothing can be compared"):
        check(model, lambda: step() and float("nan"))


@contract
def swift_without_labels_is_refused() -> None:
    model = build(model_class := bridge_model())
    trainer = SwiftTrainer(model, swift_file(model_class))
    with pytest.raises(NotImplementedError, match=UNLABELLED):
        trainer.train(swift_batch() | {"labels": None})
    assert trainer.state.iteration == 0, "in the first step"


# ---- slime ---------------------------------------------------------------------------------------------------------

RESPONSES = (12, 17)


def slime_batch() -> dict[str, Any]:
    """slime/backends/megatron_utils/data.py, `get_batch`."""
    tokens, _, _ = row()
    masks = [torch.ones(length, dtype=torch.int) for length in RESPONSES]
    masks[1][3:6] = 0
    return {
        "tokens": tokens, "unconcat_tokens": list(tokens[0].split(LENGTHS)), "loss_masks": masks,
        "total_lengths": list(LENGTHS), "response_lengths": list(RESPONSES),
    }  # fmt: skip


def sum_of_token(values: Tensor) -> Tensor:
    """slime/backends/megatron_utils/cp_utils.py, with --calculate-per-token-loss."""
    parts = zip(values.split(RESPONSES), slime_batch()["loss_masks"], strict=True)
    return sum((part * mask).sum() for part, mask in parts)


def sft_loss_function(args: Any, batch: dict[str, Any], logits_1TV: Tensor, sum_of_sample_mean: Callable) -> Any:
    """slime/backends/megatron_utils/loss.py"""
    log_probs, end = [], 0
    for tokens, total, response in zip(batch["unconcat_tokens"], LENGTHS, RESPONSES, strict=True):
        end += total
        rows = logits_1TV[0, end - response - 1 : end - 1].log_softmax(-1)
        log_probs.append(rows.gather(1, tokens[-response:, None])[:, 0])
    loss = -sum_of_sample_mean(torch.cat(log_probs))
    return loss, {"loss": loss.detach().clone()}


def slime_file() -> dict[str, Any]:
    return file_of(
        "slime.backends", slime={}, slime__backends={}, slime__backends__megatron_utils={},
        slime__backends__megatron_utils__loss={"sft_loss_function": sft_loss_function},
    )  # fmt: skip


def slime_args(**others: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"context_parallel_size": 1, "sequence_parallel": False} | others)


def slime_forward(model: Any) -> Tensor:
    """slime/backends/megatron_utils/model.py, `train_one_step`: the model is never given labels."""
    return model(input_ids=row()[0], position_ids=None, attention_mask=causal(), labels=None, loss_mask=None)


def slime_step(model: Any, hook: Callable | None, loss_function: Callable) -> tuple[dict[str, Any], Gradients]:
    if hook is not None:
        hook(slime_args(), 0, 0, [model], None, None)
    loss, log = loss_function(slime_args(), slime_batch(), slime_forward(model), sum_of_token)
    return log, gradients(model, loss)


def slime_labels() -> Tensor:
    """[1, T]: a token's label where it is of a response and not masked, else -100."""
    labels, end = torch.full((1, TOTAL), -100), 0
    for total, response, mask in zip(LENGTHS, RESPONSES, slime_batch()["loss_masks"], strict=True):
        end += total
        own = row()[0][0, end - response : end]
        labels[0, end - response - 1 : end - 1] = own.masked_fill(mask == 0, -100)
    return labels


@contract
def slime_trains_with_simreg() -> None:
    model, names = build(), slime_file()
    wanted = sought(model, slime_labels())
    for _ in range(2):
        log, found = slime_step(model, names["catch_states"], names["loss_with_simreg"])
        assert_same(found, wanted)
        torch.testing.assert_close(log["loss"], wanted.loss)
        torch.testing.assert_close(log["simreg"], wanted.simreg, rtol=1e-4, atol=0)
    assert len(names["hooks"]) == 1
    model.eval()
    with torch.no_grad():  # log-probabilities of the policy, before a step
        slime_forward(model)
    assert names["states"] == []


@contract
def slime_forgotten_flags_are_errors() -> None:
    model, names = build(), slime_file()
    with pytest.raises(RuntimeError, match="found no hidden states: set --custom-megatron-before-train-step-hook-path"):
        slime_step(model, None, names["loss_with_simreg"])
    slime_step(model, names["catch_states"], sft_loss_function)
    with pytest.raises(RuntimeError, match="were not used: set --loss-type custom_loss"):
        slime_step(model, names["catch_states"], sft_loss_function)
    with pytest.raises(NotImplementedError, match="--context-parallel-size 1"):
        names["catch_states"](slime_args(context_parallel_size=2), 0, 0, [model], None, None)


@contract
def slime_gathers_what_sequence_parallelism_splits() -> None:
    """Two tensor ranks hold half of the states each; the gradient of each half is that of the whole."""
    names, rank = slime_file(), torch.distributed.get_rank()
    noise = torch.randn(TOTAL, 1, WIDTH, generator=torch.Generator().manual_seed(5))
    whole = (1 + 0.1 * noise).requires_grad_()
    names["states"][:] = [whole]
    wanted = sum_of_token(names["terms"](slime_args(), slime_batch()))
    wanted.backward()
    half = whole.detach().chunk(2)[rank].clone().requires_grad_()
    names["states"][:] = [half]
    found = sum_of_token(names["terms"](slime_args(sequence_parallel=True), slime_batch()))
    found.backward()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(half.grad, whole.grad.chunk(2)[rank])
    assert half.grad.norm() > 0


# ---- verl ----------------------------------------------------------------------------------------------------------


@contract
def verl_fused_forward_of_its_own_is_an_error() -> None:
    """model_forward_fused.py before: `forward` of the object is replaced, and `_postprocess` is not called."""
    install(config=CONFIG)
    model = build()

    def fused_forward(self: Any, input_ids, position_ids, attention_mask, labels=None, temperature=1.0) -> Any:
        decoder_input, rotary, *_ = self._preprocess(input_ids=input_ids, position_ids=position_ids)
        return self.decoder(hidden_states=decoder_input, attention_mask=attention_mask, rotary_pos_emb=rotary)

    model.forward = fused_forward.__get__(model)
    with pytest.raises(NotImplementedError, match=BYPASSED):
        model(input_ids=row()[0], attention_mask=causal(), position_ids=None, labels=row()[1], temperature=1.0)


# ---- the contract that a loop is checked against ------------------------------------------------------------------


def labelled_step(model: Any, most: int = 9999) -> Tensor:
    loss = model(row()[0], None, causal(), labels=row()[1].clamp(0, most)).mean()
    loss.backward()
    return loss


def refusal(model: Any, forward_backward: Callable[[], Any]) -> str:
    from simreg_megatron.loop.contract import ContractError, check

    with pytest.raises(ContractError) as error:
        check(model, forward_backward)
    return str(error.value)


@contract
def a_sound_loop_keeps_the_contract() -> None:
    from simreg_megatron.loop.contract import check

    model = build()
    for layer in model.decoder.layers:
        layer.hidden_dropout = 0.1
    install(config=CONFIG)
    ask([model], lambda: labelled_step(model))
    found = check(model, lambda: labelled_step(model))

    def into_buffers() -> Tensor:  # as Megatron's wrapper
        loss = labelled_step(model)
        for weight in model.parameters():
            weight.main_grad, weight.grad = getattr(weight, "main_grad", 0) + weight.grad, None
        return loss

    model.zero_grad_buffer = lambda: [vars(weight).pop("main_grad", None) for weight in model.parameters()]
    assert check(model, into_buffers) == found
    assert found.parameters == len(list(model.parameters())) and 0 < found.changed < found.parameters, found
    assert found.change > 0.1, found  # all but the output layer's, which comes after the hidden states
    assert all(weight.grad is None for weight in model.parameters())


@contract
def a_lambda_that_changes_is_checked_where_it_is_whole() -> None:
    from simreg_megatron.loop.contract import check

    model = build()
    install(config=CONFIG)
    whole = check(model, lambda: labelled_step(model))
    uninstall()
    changing = {"warmup_iters": 7, "lambda_schedule": "linear:0", "off_after": 0.5, "every": 3}
    install(config=dataclasses.replace(CONFIG, **changing))
    found = check(model, lambda: labelled_step(model))
    assert found.changed == whole.changed and found.change == pytest.approx(3 * whole.change, rel=1e-4)
    with pytest.raises(RuntimeError, match="needs Megatron's training loop, or one that passes"):
        labelled_step(model)  # the step that was looked at has counted none for a loop that counts none itself


@contract
def broken_loops_are_told_apart() -> None:
    model, batches = build(), iter(range(9))
    install(config=CONFIG)

    def other_data() -> Tensor:
        loss = model(row()[0].roll(next(batches)), None, causal(), labels=row()[1].clamp(min=0)).mean()
        loss.backward()
        return loss

    def loss_of_its_own() -> Tensor:
        model(row()[0], None, causal(), labels=row()[1].clamp(min=0))
        loss = model(row()[0], None, causal()).logsumexp(-1).mean()
        loss.backward()
        return loss

    def log_with_simreg() -> float:
        loss = labelled_step(model)
        return loss.item() + float(weight.grad.norm())

    runs_so_far, weight = itertools.count(), model.embedding.word_embeddings.weight

    def with_simreg_alone(gradient: Tensor | None) -> Tensor:
        loss = labelled_step(model)
        weight.grad = gradient if next(runs_so_far) % 3 == 1 else weight.grad
        return loss

    assert "without SimReg gave different results" in refusal(model, other_data)
    number = len(list(model.parameters()))
    sentence = f"{number} parameters have a gradient without SimReg and {number - 1} with it: forward_backward must not"
    assert sentence in refusal(model, lambda: with_simreg_alone(None))
    overflown = torch.full_like(weight, math.inf)
    assert "with SimReg a gradient is not finite" in refusal(model, lambda: with_simreg_alone(overflown))
    assert "no gradient changes with SimReg: this loop does not train on" in refusal(model, loss_of_its_own)
    assert "its own is too small to change a digit" in refusal(model, lambda: labelled_step(model, 0))
    assert "which SimReg leaves unchanged" in refusal(model, log_with_simreg)
    uninstall()
    install(config=SimRegConfig())
    with pytest.raises(ValueError, match="while lambda is 0"):
        ask([model], lambda: labelled_step(model))


# ---- Liger's patches of Megatron -----------------------------------------------------------------------------------


def train_with_liger(*, installs_first: bool) -> None:
    """Both patches, in this order; Liger's kernels, which need a GPU, are torch's functions and are counted."""
    from liger_kernel.megatron import apply_liger_kernel_to_megatron, rms_norm
    from liger_kernel.transformers import vocab_parallel_cross_entropy
    from megatron.core.fusions import fused_cross_entropy
    from megatron.core.models.common.language_module import language_module
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy as megatrons

    from simreg_megatron.loop.contract import check

    used: list[str] = []

    def norm(x: Tensor, weight: Tensor, eps: float, *others: Any) -> Tensor:
        used.append("norm")
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    def cross_entropy(logits: Tensor, labels: Tensor, *others: Any) -> Tensor:
        used.append("cross-entropy")
        return megatrons(logits, labels)

    rms_norm.LigerRMSNormFunction = SimpleNamespace(apply=norm)
    vocab_parallel_cross_entropy.LigerVocabParallelCEFunction = SimpleNamespace(apply=cross_entropy)
    if installs_first:
        install(config=CONFIG)
    apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=True)
    language_module.fused_vocab_parallel_cross_entropy = fused_cross_entropy.fused_vocab_parallel_cross_entropy
    if not installs_first:
        install(config=CONFIG)
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
    model = build(normalization="RMSNorm", **fused)
    assert check(model, lambda: labelled_step(model)).change > 0.1
    assert used.count("norm") == 5 * used.count("cross-entropy") == 5 * 3, "two layers and the last norm, in 3 passes"


@contract
def liger_before_simreg() -> None:
    train_with_liger(installs_first=False)


@contract
def liger_after_simreg() -> None:
    train_with_liger(installs_first=True)


# ---- NeMo Automodel ------------------------------------------------------------------------------------------------


def test_automodel_trains_with_simreg(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Automodel's own call of a loss; its kernel needs a GPU."""
    name = "nemo_automodel.components.loss.linear_ce"
    linear_ce = pytest.importorskip(name, reason="nemo_automodel is not installed")
    from nemo_automodel.components.loss.utils import calculate_loss

    def cross_entropy(states: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, **others: Any) -> Tensor:
        logits = (states @ weight.T).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=ignore_index, reduction="sum")

    monkeypatch.setattr(linear_ce, "HAVE_CUT_CROSS_ENTROPY", True)
    monkeypatch.setattr(linear_ce, "linear_cross_entropy", cross_entropy, raising=False)
    loss_class = file_of("simreg_in_automodel")["SimRegCrossEntropy"]
    (_, labels, _), weight = row(), torch.randn(VOCABULARY, WIDTH)
    states, number = torch.randn(1, TOTAL, WIDTH, requires_grad=True), int((labels >= 0).sum())

    def gradient(loss_fn: Any) -> tuple[Tensor, Tensor]:
        given = {"hidden_states": states, "labels": labels, "lm_weight": weight, "num_label_tokens": number}
        loss = calculate_loss(loss_fn, model=None, logits=None, **given)
        return loss.detach(), torch.autograd.grad(loss, states)[0]

    plain = gradient(linear_ce.FusedLinearCrossEntropy())
    found = gradient(loss_class(simreg_lambda=30.0, simreg_chunk_size=16, simreg_temperature=0.5))
    term = simreg_loss(states, labels, chunk_size=16, temperature=0.5, reduction="sum") / number
    (wanted,) = torch.autograd.grad(30 * term, states)
    assert found[0] == plain[0], "the logged loss is the cross-entropy alone"
    torch.testing.assert_close(found[1] - plain[1], wanted)
    assert wanted.norm() > 0.1 * plain[1].norm()


# ---- each in a process of its own ----------------------------------------------------------------------------------


def run(check: str) -> None:
    start()
    globals()[check]()
    print(f"{check}: as expected")


@pytest.mark.megatron
@pytest.mark.parametrize("check", CONTRACTS)
def test_contract(check: str, tmp_path: Path) -> None:
    if check.startswith("liger"):
        pytest.importorskip("liger_kernel.megatron", reason="Liger's adapter for Megatron is not installed")
    log, ranks = tmp_path / "log", 2 if check in ON_TWO_RANKS else 1
    status = forks.run_ranks(run, check, processes=ranks, log=log, timeout=runs.TIMEOUT)
    said = log.read_text()
    assert status == 0 and said.count(f"{check}: as expected") == ranks, said[-3000:]


@pytest.fixture
def names() -> dict[str, Any]:
    pytest.importorskip("transformers")
    found = (block for block in blocks(ROOT / "docs/ecosystem.md") if "TrainingArguments" in block.text)
    (block,) = (block for block in found if block.language == "python")
    names: dict[str, Any] = {}
    exec(block.text.split("text = ")[0], names)
    return names


def gradient(model: Any, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return model.model.layers[0].mlp.up_proj.weight.grad.clone()


@pytest.mark.parametrize("count", [None, 100])
def test_a_trainer_of_transformers_has_their_loss_and_ours(names: dict[str, Any], count: int | None) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        output_hidden_states=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 11, (3, 20))
    labels = tokens.clone()
    labels[1, 7:] = -100
    with_simreg: Callable[..., torch.Tensor] = names["loss_with_simreg"]
    found = gradient(model, with_simreg(model(tokens), labels, count))
    num_labels = (labels[:, 1:] >= 0).sum()
    share = 1 if count is None else num_labels / count
    outputs = model(tokens, labels=labels)
    norm = []
    model.model.norm.register_forward_hook(lambda module, given, result: norm.append(result))
    model(tokens)
    simreg = simreg_loss(norm[0][:, :-1], labels[:, 1:], reduction="sum") / num_labels
    assert simreg > 0.1
    torch.testing.assert_close(found, gradient(model, (outputs.loss + names["LAMBDA"] * simreg) * share))
    own = with_simreg(model(tokens), labels, count)
    torch.testing.assert_close(own, (outputs.loss + names["LAMBDA"] * simreg) * share)
    assert not torch.isclose(own, outputs.loss * share), "the term is seen"
