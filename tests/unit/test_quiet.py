# SPDX-License-Identifier: Apache-2.0
"""launch/quiet.py: what Megatron 0.19 says at the start of a tiny run, and what is left of it."""

from __future__ import annotations

import io
import logging
import sys
import warnings

import pytest

from launch import preflight, quiet

# As a real start printed them; (line, whether it is shown).
STARTING = (
    ("using world size: 1, data-parallel size: 1", True),
    ("/x/site-packages/megatron/training/utils/common_utils.py:454: UserWarning: Overriding default arguments", False),
    ("  warnings.warn(message)", False),
    ("  indented, but of nobody's warning", True),
    ("INFO:megatron.core.num_microbatches_calculator:setting number of microbatches to constant 1", True),
    ("WARNING: one_logger package is required to enable e2e metrics tracking. please go to https://x", False),
    ("WARNING:megatron.core.tensor_parallel.random:CPU RNG state changed within GPU RNG context", False),
    ("WARNING:megatron.core.models.gpt.gpt_model:GPTModel IS DEPRECATED. GPTModel is only", False),
    (" > number of parameters on (tensor, gtp_remat, pipeline) model parallel rank (0, 0, 0): 3344064", True),
    ("INFO:megatron.core.distributed.param_and_grad_buffer:Number of buckets for gradient all-reduce: 1", True),
    ("Params for bucket 1 (3344064 elements, 3344064 padded size, 0 param(s) with extra main_grads):", False),
    ("\toutput_layer.weight (param.main_grad.dtype=torch.float32)", False),
    ("\tdecoder.layers.3.mlp.linear_fc2.weight (param.main_grad.dtype=torch.float32)", False),
    ("> SimReg: lambda 1, temperature 0.01, chunks of 64 tokens, scope exact, impl tiled", True),
    ("/x/site-packages/torch/distributed/c10d_logger.py:83: FutureWarning: `torch.distributed` is deprecated", False),
    (" [2026-11-22 04:21:11.4] iteration        1/      16 | lm loss: 8.3E+00 |", True),
    ("/home/me/my_script.py:3: UserWarning: the user's own", True),
    ("WARNING:megatron.core.rerun_state_machine:Result validation enabled", True),
)
TABLE = (
    "------------------------ arguments ------------------------",
    "  adam_beta1 ...................................... 0.9",
    "  adam_beta2 ...................................... 0.95",
    "-------------------- end of arguments ---------------------",
)


def filtered(*lines: str) -> list[str]:
    out = io.StringIO()
    quiet.QuietStream(out).write("".join(f"{line}\n" for line in lines))
    return out.getvalue().splitlines()


def test_start_up_noise_is_left_out_and_all_else_stays() -> None:
    assert filtered(*(line for line, _ in STARTING)) == [line for line, wanted in STARTING if wanted]
    table = ["before", "(Megatron lists 2 arguments here: --verbose shows them)", "after"]
    assert filtered("before", *TABLE, "after") == table


@pytest.mark.parametrize("verbose", [False, True])
def test_prints_logs_and_warnings_alike(verbose: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with quiet.quiet_output(verbose=verbose):
        handler = logging.StreamHandler()
        record = logging.LogRecord(
            "m", logging.INFO, "f", 1, "\n".join(line for line, _ in STARTING[10:13]), None, None
        )
        print(*TABLE, sep="\n")
        print("no line end", end="")
        handler.emit(record)
        sys.stderr.write(warnings.formatwarning("deprecated", FutureWarning, "/x/site-packages/torch/a.py", 3, "f()"))
        print("kept", file=sys.stderr)
        assert sys.stdout.isatty() is False, "the rest of a stream is as it was"
    assert (sys.stdout, sys.stderr) == (out, err)
    if verbose:
        assert "adam_beta1" in out.getvalue() and "Params for bucket" in err.getvalue() and "f()" in err.getvalue()
    else:
        assert out.getvalue() == "(Megatron lists 2 arguments here: --verbose shows them)\nno line end"
        assert err.getvalue() == "kept\n"


@pytest.mark.parametrize("trains", [True, False])
def test_megatron_is_imported_under_the_output_that_its_log_will_keep(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers of a log hold the stream that they find: under a silence that ends, all of it would be lost."""
    found = []
    monkeypatch.setattr(preflight, "_megatrons_parser", lambda **_: found.append(sys.stderr))
    preflight.check_with_megatron((), options=(), tree=None, trains=trains, world_size=1)
    assert (found == [sys.stderr]) is trains
