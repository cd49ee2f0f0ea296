# SPDX-License-Identifier: Apache-2.0
"""Settings under which SimReg would be wrong or silent are refused by name; open log writers get its values."""

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch

from simreg_megatron import SimRegConfig, notices
from simreg_megatron.parallel import output_layer
from simreg_megatron.parallel.layout import ShardLayout
from simreg_megatron.parallel.shard import SequenceShard
from simreg_megatron.plugin import compat, installation, log, refusals
from simreg_megatron.plugin import loop as plugin_loop
from simreg_megatron.plugin.log import write_scalars
from simreg_megatron.plugin.tokens import main_hidden_states, shard_of, valid_tokens

LABELS = torch.zeros(2, 8, dtype=torch.long)


def test_a_step_in_many_that_never_comes_is_refused() -> None:
    schedule = SimRegConfig(lambda_=1, every=4, start_iter=5)
    with pytest.raises(ValueError, match="--simreg-every 4 has no step before 8, and SimReg ends at 8"):
        refusals.refuse_arguments(SimpleNamespace(log_interval=1, train_iters=8), schedule)
    refusals.refuse_arguments(SimpleNamespace(log_interval=1, train_iters=9), schedule)


PACKINGS = [
    ({"dataloader_inter_document_masking": True, "context_parallel_size": 2}, "over context ranks as a whole"),
    *(
        ({name: True, "sequence_parallel": True}, "not with --sequence-parallel or sample=replicas")
        for name in ("hybrid_context_parallel", "dynamic_context_parallel")
    ),
    ({"sft": True, "overlap_moe_expert_parallel_comm": True}, "not tell the model where packed sequences begin"),
]


@pytest.mark.parametrize(("flags", "sentence"), PACKINGS)
def test_packing_that_cannot_be_followed_is_refused(flags: dict, sentence: str) -> None:
    config = SimRegConfig(lambda_=1)
    with pytest.raises(NotImplementedError, match=sentence) as caught:
        refusals.refuse_arguments(SimpleNamespace(log_interval=1, **flags), config)
    assert "--simreg-lambda 0" in str(caught.value)
    unpacked = dict.fromkeys(flags, False) | {"context_parallel_size": 2}
    refusals.refuse_arguments(SimpleNamespace(log_interval=1, **unpacked), config)
    refusals.refuse_arguments(SimpleNamespace(log_interval=1, sft=True, context_parallel_size=2), config)


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [("cp_partition_mode", "two_chunk", "cp_partition_mode zigzag or contiguous .* is two_chunk"),
     ("qkv_format", "sbhd", "is sbhd"),
     ("is_hybrid", True, "not with --sequence-parallel or sample=replicas")],
)  # fmt: skip
def test_rows_that_are_cut_otherwise_are_refused(name: str, given: object, sentence: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"{sentence}.*--simreg-lambda 0"):
        refusals.refuse_cut(SimpleNamespace(**{name: given}), None, is_hybrid=name == "is_hybrid", rows_split=True)


def test_rows_of_one_length_are_cut_by_document_in_fine_tuning_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match=r"over context ranks as a whole.*--simreg-lambda 0"):
        refusals.refuse_cut(SimpleNamespace(), 8)
    monkeypatch.setattr(compat, "arguments", lambda: SimpleNamespace(sft=True))
    refusals.refuse_cut(SimpleNamespace(qkv_format="thd", cp_partition_mode="zigzag"), 8)


@pytest.mark.parametrize(
    "flags", [{"logits_load_dir": "/logits", "logits_load_kd_loss_alpha": 1.0}, {"export_kd_teacher_load": "/teacher"}]
)
def test_a_loss_that_weighs_megatrons_is_refused(flags: dict) -> None:
    """Distillation trains on (1 - alpha) times the loss that SimReg's gradient is tied to, and alpha is 1."""
    with pytest.raises(NotImplementedError, match="and SimReg would be weighed with it, or silenced: drop one of them"):
        refusals.refuse_arguments(SimpleNamespace(log_interval=1, **flags), SimRegConfig(lambda_=1))
    refusals.refuse_arguments(SimpleNamespace(log_interval=1, **flags), SimRegConfig(objective="none"))
    refusals.refuse_arguments(SimpleNamespace(log_interval=1, **dict.fromkeys(flags)), SimRegConfig(lambda_=1))


def test_rows_of_a_part_of_the_output_layer_are_refused() -> None:
    """With --tensor-parallel-num-weight-shards a rank's storage looks whole, and is not the rank's rows."""
    layer = torch.nn.Linear(4, 8)
    part = SimpleNamespace(output_layer=layer, pg_collection=None, share_embeddings_and_output_weights=False)
    assert output_layer.has_whole_head(part) and not output_layer.is_cut_up(part)
    config = SimRegConfig(lambda_=1, objective="sigmoid", objective_options="pairs=hidden-head")
    refusals.refuse_models(config, [part], (SimpleNamespace,))
    layer.weight.is_gtp_weight_remat = True
    assert not output_layer.has_whole_head(part), "so the log has no margins"
    with pytest.raises(NotImplementedError, match="and --tensor-parallel-num-weight-shards scatters them"):
        refusals.refuse_models(config, [part], (SimpleNamespace,))
    refusals.refuse_models(SimRegConfig(lambda_=1), [part], (SimpleNamespace,))


NOT_COMPARED = [
    ({"micro_batch_size": 1}, "a micro-batch has 1: give --micro-batch-size 2 or more"),
    ({"micro_batch_size": 2, "sft": True}, "packed rows hold several: train unpacked"),
    ({"micro_batch_size": 2, "sequence_packing_scheduler": "dp_balanced"}, "packed rows hold several"),
]


@pytest.mark.parametrize(("flags", "sentence"), NOT_COMPARED)
def test_sequences_that_cannot_be_compared_are_refused(flags: dict, sentence: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=sentence):
        refusals.refuse_arguments(SimpleNamespace(log_interval=1, **flags), SimRegConfig(lambda_=1, objective="simcse"))
    refusals.refuse_arguments(SimpleNamespace(log_interval=1, **flags), SimRegConfig(lambda_=1, objective="creg"))


@pytest.mark.parametrize(
    ("settings", "name", "enough"),
    [
        ({"lambda_": 1, "objective": "mic", "objective_options": "prefixes=8/64"}, "mic", 65),
        ({"objective": "sigreg:1,simreg:1", "objective_options": "simreg.prefixes=8/64"}, "simreg", 64),
    ],
    ids=["mic, which has a rest", "simreg with another"],
)
def test_prefixes_wider_than_the_states_are_refused(settings: dict, name: str, enough: int) -> None:
    config, args = SimRegConfig(**settings), SimpleNamespace(log_interval=1, hidden_size=enough)
    refusals.refuse_arguments(args, config)
    args.hidden_size = enough - 1
    sentence = f"objective {name} cannot take 64 features of states of width {enough - 1}: give prefixes of at most 63"
    with pytest.raises(ValueError, match=sentence):
        refusals.refuse_arguments(args, config)


def test_states_that_are_not_this_ranks_tokens_are_refused() -> None:
    """Rank 1 of two that split 8 tokens holds 4 of them; behind these may come the 4 of each further prediction."""
    shard = SequenceShard(ShardLayout(8, 1, 2, True), (0, 1), None, None)
    states = torch.arange(24.0).view(12, 1, 2)
    for rows in (4, 8, 12):
        assert torch.equal(main_hidden_states(states[:rows], shard), states[:4])
    for rows in (3, 5, 7):
        sentence = rf"expected 4 states a rank \(or a multiple, with MTP\), Megatron gave {rows}"
        with pytest.raises(RuntimeError, match=sentence):
            main_hidden_states(states[:rows], shard)


def test_labels_without_a_mask_all_count_and_that_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    notices.forget()
    labels = torch.tensor([[3, -100, 0, -1]])
    for _ in range(2):
        assert valid_tokens(labels, None).tolist() == [[True, False, True, False]]
    assert capsys.readouterr().out.count("> SimReg: no loss mask reaches the model, so every token with a label") == 1
    assert valid_tokens(labels, torch.tensor([[0, 1, 1, 1]])).tolist() == [[False, False, True, False]]


def test_ranks_in_an_unknown_order_are_refused() -> None:
    """Context ranks numbered before tensor ranks would put foreign rows where the own ones belong."""

    def ranked(size: int, rank: int) -> SimpleNamespace:
        return SimpleNamespace(size=lambda: size, rank=lambda: rank)

    groups = SimpleNamespace(tp=ranked(2, 1), cp=ranked(2, 0), tp_cp=ranked(4, 2))
    model = SimpleNamespace(pg_collection=groups, config=SimpleNamespace(sequence_parallel=True))
    with pytest.raises(NotImplementedError, match="numbered before context-parallel ones"):
        shard_of(model, LABELS, groups.cp)
    groups.tp_cp = ranked(4, 1)
    assert shard_of(model, LABELS, groups.cp).rank == (0, 1)


@pytest.mark.parametrize("tokenizer", [SimpleNamespace(), SimpleNamespace(eod=None)])
def test_a_document_mask_without_document_ends_is_refused(tokenizer: SimpleNamespace, monkeypatch) -> None:
    module = ModuleType("megatron.training.global_vars")
    module.get_tokenizer = lambda: tokenizer
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    with pytest.raises(ValueError, match="no end-of-document token: use another tokenizer, or drop it"):
        plugin_loop.end_of_document()
    tokenizer.eod = 7
    assert plugin_loop.end_of_document() == 7


NOT_REPEATED = [
    (SimRegConfig(lambda_=1, every=4), NotImplementedError, "--simreg-every 4 leaves SimReg out of most steps"),
    (SimRegConfig(objective="sigreg", lambda_=1), NotImplementedError, "sigreg draws again in each step"),
    (SimRegConfig(objective="simreg:1,placebo:1"), NotImplementedError, "placebo draws again in each step"),
    (SimRegConfig(objective="none"), ValueError, "only measures here"),
    (SimRegConfig(lambda_=1, log_interval=10), ValueError, "--simreg-log-interval has no effect"),
]


@pytest.mark.parametrize(
    "graphs",
    [{"cuda_graph_impl": "full_iteration"}, {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}],
)
@pytest.mark.parametrize(("config", "kind", "why"), NOT_REPEATED)
def test_what_full_iteration_graphs_cannot_repeat_is_refused(graphs: dict, config: SimRegConfig, kind, why) -> None:
    with pytest.raises(kind, match=why):
        refusals.refuse_arguments(SimpleNamespace(log_interval=1, **graphs), config)
    with pytest.raises(ValueError, match="set --cuda-graph-warmup-steps to 1 or more"):
        args = SimpleNamespace(log_interval=1, cuda_graph_warmup_steps=0, **graphs)
        refusals.refuse_arguments(args, SimRegConfig(lambda_=1))
    for scope in ("attn", "full_iteration_inference", ["attn", "mlp"]):
        layers = SimpleNamespace(log_interval=1, cuda_graph_impl="local", cuda_graph_scope=scope)
        refusals.refuse_arguments(layers, config)


class Writer:
    def __init__(self) -> None:
        self.written: list[tuple] = []

    def add_scalar(self, name: str, value: torch.Tensor, iteration: int) -> None:
        self.written.append((name, value.item(), iteration))

    def log(self, values: dict, iteration: int) -> None:
        self.written += [(name, value, iteration) for name, value in values.items()]


@pytest.mark.parametrize("there", [("tensorboard",), ("wandb",), ("tensorboard", "wandb"), ()])
def test_values_reach_the_writers_that_are_open(there: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    writers = {name: Writer() if name in there else None for name in ("tensorboard", "wandb")}
    module = ModuleType("megatron.training.global_vars")
    module.get_tensorboard_writer = lambda: writers["tensorboard"]
    module.get_wandb_writer = lambda: writers["wandb"]
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    write_scalars({"simreg loss": torch.tensor(0.5)}, 7)
    write_scalars({"simreg loss": torch.tensor(0.25)}, 8)
    for name in there:
        assert writers[name].written == [("simreg loss", 0.5, 7), ("simreg loss", 0.25, 8)]


def megatrons_line(total_loss_dict: dict, iteration: int, skipped_iter: int) -> None:
    """As `training_log` prints it, from 0.12 on to 0.19."""
    total_loss_dict["advanced iterations"] = 5
    averages = {name: total.item() / 5 for name, total in total_loss_dict.items() if name != "advanced iterations"}
    shown = (f" {name}: {mean:.6E} |" for name, mean in averages.items() if mean > 0)
    print(f" iteration {iteration} |" + "".join(shown))


def test_numbers_below_zero_reach_the_console(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    means = {"simreg loss": 0.5, "simreg margin": -1.25, "simreg margin 10%": -4.0, "simreg negative cosine": -0.125}
    found = {name: torch.tensor(value) for name, value in means.items()}
    monkeypatch.setattr(log, "reduced_means", lambda **_: dict(found))
    written = []
    monkeypatch.setattr(log, "write_scalars", lambda means, iteration: written.append(iteration))
    monkeypatch.setattr(compat, "arguments", lambda: SimpleNamespace(log_interval=5))
    made = installation.Installation(SimRegConfig(lambda_=1, log_interval=10), lambda config: ())
    monkeypatch.setattr(installation, "_installation", made)
    megatrons_log = partial(log.report, megatrons_line)
    megatrons_log({"advanced iterations": 4}, 5, 0)
    assert capsys.readouterr().out.splitlines() == [" iteration 5 |"], "no log step of SimReg"
    megatrons_log({"advanced iterations": 5}, 10, 1)  # a skipped one, which does not count
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        " iteration 10 | simreg loss: 5.000000E-01 |",
        "> SimReg at iteration 10, next to Megatron's line, which has no numbers below 0: "
        "simreg margin: -1.250000E+00 | simreg negative cosine: -1.250000E-01",
    ]
    found |= {name: value.abs() for name, value in found.items()}
    megatrons_log({"advanced iterations": 4}, 20, 0)
    assert len(capsys.readouterr().out.splitlines()) == 1, "where nothing is missing, nothing is said"
    assert written == [10, 20]
