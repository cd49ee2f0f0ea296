# SPDX-License-Identifier: Apache-2.0
"""The launcher's own options, and the presets, layouts and recipes that they choose from."""

from __future__ import annotations

import argparse
from pathlib import Path

from launch.flags import Flag, LaunchError, read_preset

PRESETS = Path(__file__).resolve().parent / "models"
LAYOUTS = Path(__file__).resolve().parent / "layouts"
TINY = "tiny"
_ADAGC = ("--adagc", "--adagc-lambda-rel", "1.04", "--adagc-beta", "0.99")
# What the paper compares: one objective each, all else alike; SimReg on chunks (table 2's "SimReg-Chunk") and on whole
# sequences ("SimReg", in both tables). Its weights for the baselines are not stated.
RECIPES: dict[str, tuple[str, ...]] = {
    "baseline": _ADAGC,
    "paper": (*_ADAGC, "--simreg-lambda", "auto"),
    "paper-full": (*_ADAGC, "--simreg-lambda", "auto", "--simreg-chunk-size", "0"),
    **{
        name: (*_ADAGC, "--simreg-objective", name, "--simreg-lambda", "0.1")
        for name in ("simcse", "cpretrain", "creg", "sce")
    },
}
_EPILOG = """Without --data the tiny model trains on a corpus that is built here, without a download.
--ffn: literal is the preset's size; aligned is the nearest that can be split and suits tensor cores.
Any other flag goes to Megatron and overrides the preset (launch/models/).
The bash form also takes torchrun's --nproc-per-node, --nnodes, --node-rank, --master-addr, --master-port and
--rdzv-*, or NPROC_PER_NODE (default: the GPUs, or 1), NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT from the
environment. MEGATRON_PATH set: that source tree's pretrain_gpt.py runs, or pretrain_hybrid.py."""


def make_parser(family: str) -> argparse.ArgumentParser:
    """Make the parser of the launcher's own options; it knows none of Megatron's."""
    script = f"launch/pretrain_{family}.sh"
    parser = argparse.ArgumentParser(
        prog=script,
        usage=f"{{torchrun [TORCHRUN FLAGS] | bash}} {script} [--model NAME] [options] [Megatron flags]",
        description=f"Pretrain a {family.capitalize()} model with Megatron; --simreg-lambda 1 adds SimReg.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    recipe = "one run of the paper's tables: AdaGC, and this objective; paper is SimReg on chunks, paper-full on whole "
    resume = "resume from the newest complete checkpoint of the run, if there is one; do nothing if the run has ended"
    text = "your tokenized text, of PREFIX.bin and PREFIX.idx; several with a WEIGHT before each"
    add = parser.add_argument
    add("--model", type=str.lower, choices=model_names(family), default=TINY, help="preset (default: tiny)")
    add("--recipe", choices=RECIPES, help=f"{recipe}sequences (default: neither)")
    add("--plain", action="store_true", help="leave the plugin out: Megatron alone, to compare with")
    add("--data", nargs="+", metavar="PREFIX", help=text)
    add("--valid-data", nargs="+", metavar="PREFIX", help="validation text (default: 1 %% of --data)")
    add("--tokenizer", metavar="PATH", help="its tokenizer: a .model file, or a Hugging Face folder or name")
    add("--ffn", metavar="SIZE", default="literal", help="FFN size: literal, aligned or a number")
    add("--output", metavar="DIR", type=Path, help="for TensorBoard and checkpoints (default: runs/)")
    add("--layout", metavar="NAME", help=f"layout of the model for a kind of machine: {', '.join(layout_names())}")
    add("--auto-resume", action="store_true", help=resume)
    add("--dry-run", action="store_true", help="print the exact command and what would run, and stop")
    return parser


def model_names(family: str) -> list[str]:
    """List the presets of a family, tiny first."""
    names = [path.stem.partition("-")[2] for path in PRESETS.glob(f"{family}-*.args")]
    return sorted(names, key=lambda name: (name != TINY, not name.endswith("m"), name))  # millions before billions


def layout_names() -> list[str]:
    """List the kinds of machines that the sizes have a layout for."""
    return sorted(path.name for path in LAYOUTS.iterdir() if path.is_dir())


def read_layout(name: str, family: str, model: str) -> list[Flag]:
    """Read how a size is spread over machines of one kind: `--nodes N`, and Megatron's flags."""
    path = LAYOUTS / name / f"{family}-{model}.args"
    if not path.is_file():
        raise LaunchError(f"there is no layout {name} for {family} {model}: drop --layout (or LAYOUT), or write {path}")
    return read_preset(path)
