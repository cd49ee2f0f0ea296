# SPDX-License-Identifier: Apache-2.0
"""Our flags: values that make sense, and values that do not."""

import argparse
import contextlib
import io

from hypothesis import strategies as st

from simreg_megatron import objectives
from simreg_megatron.config.flags import add_simreg_arguments
from simreg_megatron.objectives import Objective

Words = tuple[str, ...]

_NOT_NUMBERS = ("", "x", "nan", "inf", "-inf", "1e400", "0x10", "1,5", "\u0663", "1_0")
_NOT_WHOLE = (*_NOT_NUMBERS, "-1", "1.5", "1e3", "9" * 30, "9" * 5000)
_NOT_SCHEDULES = (
    "",
    *["linear", "linear:", "linear:1", "constant:1", "linear:nan", "cosine:inf", "cosine:-1", "linear:1e308", ":"],
)
_NOT_WORDS = ("", " ", "exact ", "Cosine", "none,none", "%s", "\u2028", "a=b")

VALUES: dict[str, tuple[Words, Words]] = {
    "--simreg-lambda": (
        ("3", "auto", "0", "0.5", "10", "1e-3", "1e4"),
        (*_NOT_NUMBERS, "-1", "AUTO", "1e-45", "1e30", "1e39", "1e300"),
    ),
    "--simreg-temperature": (("0.5", "0.01", "0.1", "1", "20"), (*_NOT_NUMBERS, "0", "-1", "1e-30", "1e-320", "1e30")),
    "--simreg-chunk-size": (("8", "0", "2", "5", "7", "16", "1024"), (*_NOT_WHOLE, "1")),
    "--simreg-scope": (("exact", "local"), _NOT_WORDS),
    "--simreg-similarity": (("cosine", "dot", "qnorm", "dnorm", "learnable"), _NOT_WORDS),
    "--simreg-layers": (
        ("1", "final", "2", "1,final", "1,2", "2,1,final"),
        ("", "0", "-1", "3", "99", "1,,2", "one", "\u00b2", "\uff12", "9" * 30, "9" * 5000, "final,final", "1;2"),
    ),
    "--simreg-placement": (("pre-norm", "post-norm"), _NOT_WORDS),
    "--simreg-group-reduce": (("mean", "sum"), _NOT_WORDS),
    "--simreg-self-positive": (("only_if_alone", "never", "always"), _NOT_WORDS),
    "--simreg-chunk-weight": (("uniform", "pos-neg-ratio", "neg-pos-ratio", "count-corrected", "token"), _NOT_WORDS),
    "--simreg-document-mask": (("",), ()),
    "--simreg-start-iter": (("1", "2", "0"), (*_NOT_WHOLE, "99")),
    "--simreg-warmup-iters": (("1", "2", "100", "0"), _NOT_WHOLE),
    "--simreg-lambda-schedule": (("linear:0.1", "cosine:0", "cosine:2", "constant"), _NOT_SCHEDULES),
    "--simreg-off-after": (("0.5", "0.6"), (*_NOT_NUMBERS, "0.01", "0.99", "0", "1", "-1", "2", "1e-320")),
    "--simreg-every": (("2", "1", "3"), (*_NOT_WHOLE, "0")),
    "--simreg-impl": (("tiled", "reference", "auto", "triton"), _NOT_WORDS),
    "--simreg-log-interval": (("1", "2", "4"), (*_NOT_WHOLE, "0", "3")),
}
"""By flag: values that make sense, the first one the plainest, and odd ones. A switch has one, which is empty."""
SWITCHES = ("--simreg-document-mask", "--adagc")

ADAGC: dict[str, tuple[Words, Words]] = {
    "--adagc-lambda-rel": (("1.04", "0.9", "2"), (*_NOT_NUMBERS, "0", "-1", "1e-320", "1e30")),
    "--adagc-lambda-abs": (("1", "0.1"), (*_NOT_NUMBERS, "0", "-1", "1e-320", "1e30")),
    "--adagc-beta": (("0.99", "0", "0.5"), (*_NOT_NUMBERS, "1", "-1", "2")),
    "--adagc-warmup-iters": (("1", "0", "100"), _NOT_WHOLE),
    "--adagc-variant": (("clipped", "raw", "global"), _NOT_WORDS),
}

_ODD_OBJECTIVES = (
    "", "SimReg", "simclr", "simreg,", ":", ",", "simreg:", "simreg:0", "simreg:nan", "simreg:1,simreg:2", "none:1",
    "simreg:auto:1", "mic", "simreg:1e30,sigreg:1e-30", "simreg:-1,creg:1", "\n",
)  # fmt: skip
_STRANGE_FLAGS = (
    "--simreg-lamda=3", "--simreg-temp=0.5", "--simreg-", "--adagc-lambda=1", "--simreg-Lambda=3", "--adagcs",
    "--simreg-document-mask=yes", "--adagc=on", "--simreg-lambda",
)  # fmt: skip


def word(flag: str, value: str) -> str:
    return flag if flag in SWITCHES and not value else f"{flag}={value}"


@st.composite
def values(draw: st.DrawFn, table: dict[str, tuple[Words, Words]], flag: str, odd: bool) -> str:
    """A flag with a value: an odd one in half of the cases where `odd`."""
    good, bad = table[flag]
    return word(flag, draw(st.sampled_from(bad if odd and bad and draw(st.booleans()) else good)))


def _choices(record: Objective, name: str, odd: bool) -> tuple[str, ...]:
    known = record.options[name]
    odd_ones = ("", "x", "nan", "inf", "-1", "1.5", "1e30", "9" * 30, "4/4", "64/", "0/8", "999")
    if isinstance(known, tuple):
        return known + (odd_ones if odd else ())
    if isinstance(known, str):
        return (known, "8", "4/8", *(odd_ones if odd else ()))
    good = (str(known), "1", "3") if isinstance(known, int) else (str(known), "0.2", "0", "1")
    return good + (odd_ones if odd else ())


@st.composite
def options(draw: st.DrawFn, name: str, odd: bool, prefix: str = "") -> Words:
    record = objectives.find(name)
    if not record.options:
        return ("nonsense=1",) if odd and draw(st.booleans()) else ()
    names = draw(st.lists(st.sampled_from(sorted(record.options)), max_size=3, unique=True))
    return tuple(f"{prefix}{name}={draw(st.sampled_from(_choices(record, name, odd)))}" for name in names)


@st.composite
def one_objective(draw: st.DrawFn, odd: bool) -> Words:
    """SimReg half of the time, or another objective with options of its own."""
    name = draw(st.sampled_from((*["simreg"] * 5, *objectives.names())))
    own = draw(options(name, odd)) if draw(st.booleans()) else ()
    given = [word("--simreg-objective", name)] if name != "simreg" else []
    strength = [] if name == "none" and not odd else [draw(values(VALUES, "--simreg-lambda", odd))]
    return (*given, *strength, *([word("--simreg-objective-options", ",".join(own))] if own else []))


@st.composite
def several_objectives(draw: st.DrawFn, odd: bool) -> Words:
    known = [name for name in objectives.names() if name != "none"]
    names = draw(st.lists(st.sampled_from(known), min_size=2, max_size=3, unique=True))
    text = ",".join(f"{name}:{draw(st.sampled_from(('1', 'auto', '0.05')))}" for name in names)
    own = [text for name in names for text in draw(options(name, odd, f"{name}."))] if draw(st.booleans()) else []
    given = [word("--simreg-objective-options", ",".join(own))] if own else []
    return (word("--simreg-objective", text), *given)


@st.composite
def settings(draw: st.DrawFn) -> Words:
    """Our flags of one run. Most go together as far as the record of settings knows; a quarter need not."""
    odd = draw(st.integers(0, 3)) == 3
    kind = draw(st.sampled_from(("one", "one", "one", "one", "several", "clipping alone", *(("odd",) if odd else ()))))
    given: list[str] = []
    if kind == "one":
        given = list(draw(one_objective(odd)))
    elif kind == "several":
        given = list(draw(several_objectives(odd)))
    elif kind == "odd":
        given = [word("--simreg-objective", draw(st.sampled_from(_ODD_OBJECTIVES))), "--simreg-lambda=1"]
    more = [flag for flag in VALUES if flag != "--simreg-lambda"]
    for flag in draw(st.lists(st.sampled_from(more), max_size=4, unique=True)) if kind != "clipping alone" else ():
        new = draw(values(VALUES, flag, odd))
        if odd or go_together([*given, new]):
            given.append(new)
    if kind == "clipping alone" or draw(st.integers(0, 3)) == 3:
        given.append("--adagc")
        for flag in draw(st.lists(st.sampled_from(sorted(ADAGC)), max_size=2, unique=True)):
            given.append(draw(values(ADAGC, flag, odd)))
    if odd and draw(st.integers(0, 9)) == 9:
        given.append(draw(st.sampled_from(_STRANGE_FLAGS)))
    return tuple(given)


def go_together(given: list[str]) -> bool:
    """Return whether the parser takes them, before Megatron's own flags are known."""
    parser = add_simreg_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            parser.parse_args(given)
    except SystemExit:
        return False
    return True
