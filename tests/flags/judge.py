# SPDX-License-Identifier: Apache-2.0
"""Verdicts on one combination: it trains, one sentence of ours refuses it, or Megatron fails without us, too."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from tests.flags.combination import Combination
from tests.flags.life import Outcome

RAN, REFUSED, MEGATRONS, WRONG = "ran", "refused", "Megatron's own", "wrong"
_OUR_ERRORS = ("ValueError", "NotImplementedError", "MegatronSeamError", "CpuBackendError", "SchemaError")
_OURS = re.compile(r"SimReg|--simreg|AdaGC|--adagc|Megatron|--load|^--|^\w+=\w+ ", re.IGNORECASE)
_MEND = re.compile(
    r": |choose|must be|ends at|did you mean|takes |needs |has no effect|drop |give |leave |set |use |name |at most"
)
_LONGEST = 450  # characters of a sentence, without the user's own
_LOST = 1e-4  # the gradient of smaller terms may change no bit


class Verdict(NamedTuple):
    """The kind, a key within its kind, and words for a reader."""

    kind: str
    what: str
    detail: str = ""


def judged(combination: Combination, found: list[Outcome], plain: Callable[[Combination], list[Outcome]]) -> Verdict:
    """The verdict; `plain` runs a combination without us, where that is needed."""
    failed = _first_failure(found)
    if failed is None:
        wrong = _silent(combination, found) or _not_finite(found)
        if wrong and not (wrong.startswith("a loss") and not _sound(plain(combination))):
            return Verdict(WRONG, wrong, f"losses {found[0].losses}, logged {found[0].logged[-1:]}")
        return Verdict(RAN, _objective(combination))
    if _is_our_sentence(failed):
        return Verdict(REFUSED, pattern(failed.said))
    for without_us in filter(None, (combination, combination.overflowing)):
        twin = _first_failure(plain(without_us))
        if twin is not None and _signature(twin) == _signature(failed):
            return Verdict(MEGATRONS, _signature(failed))
    return Verdict(WRONG, _signature(failed), " < ".join(reversed(failed.trace)) or failed.said)


def apart(combination: Combination, found: list[Outcome], plain: list[Outcome]) -> Verdict | None:
    """Compare a run that trained with the same without us: what is wrong. The first loss is Megatron's; parameters are
    if and only if nothing of ours trains."""
    if _first_failure(plain) is not None:
        return Verdict(WRONG, "plain Megatron fails where we train", _signature(_first_failure(plain) or Outcome()))
    for ours, theirs in zip(found, plain, strict=True):
        if ours.losses[:1] != theirs.losses[:1]:
            return Verdict(WRONG, "another first loss than Megatron's", f"{ours.losses} {theirs.losses}")
    if any(norm is None for outcome in found for norm in outcome.norms):
        return None  # skipped: no parameter moved
    same = all(ours.digest == theirs.digest for ours, theirs in zip(found, plain, strict=True))
    clips = any("--adagc" in word for word in combination.ours)
    changes = clips or any(any(outcome.strength) and outcome.terms for outcome in found)
    if same and changes and _is_felt(combination, found):
        return Verdict(WRONG, "trains as plain Megatron does", f"{found[0].norms}")
    if not same and not changes:
        return Verdict(WRONG, "is off, and trains otherwise than Megatron", f"{found[0].norms} {plain[0].norms}")
    return None


def _is_felt(combination: Combination, found: list[Outcome]) -> bool:
    """Return whether some bit must change: SimReg of a strong weight alone, and not so near 0 that float32 loses it."""
    given = _given(combination)
    weights = ("auto", "0.5", "3", "10", "1e4")
    strong = ":" in given.get("--simreg-objective", "") or given.get("--simreg-lambda") in weights
    logged = [pair for outcome in found for line in outcome.logged for pair in line.items()]
    terms = [value for name, value in logged if name.endswith(" loss")]
    return strong and "--adagc" not in combination.ours and max(terms, default=0.0) > _LOST


def _given(combination: Combination) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in combination.ours)


def _first_failure(found: list[Outcome]) -> Outcome | None:
    """Return the rank that raised an error of ours, else the first that failed otherwise than by a lost peer."""
    failed = [outcome for outcome in found if outcome.error and outcome.error != "exit 0"]
    for is_wanted in (_is_our_sentence, lambda outcome: "gloo" not in outcome.said and "peer" not in outcome.said):
        for outcome in failed:
            if is_wanted(outcome):
                return outcome
    return failed[0] if failed else None


def _is_our_sentence(failed: Outcome) -> bool:
    """One line of ours with a cause and a way out."""
    said = failed.said
    if failed.error.startswith("exit"):
        if not said.startswith("error: "):
            return False
        said = said.removeprefix("error: ")
    elif not (failed.is_ours and failed.error in _OUR_ERRORS):
        return False
    own_words = re.sub(r"9{9,}", "9", said)
    is_one_line = "\n" not in said and said.isprintable() and len(own_words) <= _LONGEST
    return is_one_line and bool(_OURS.search(said)) and bool(_MEND.search(said))


def _sound(found: list[Outcome]) -> bool:
    return _first_failure(found) is None and not _not_finite(found)


def _not_finite(found: list[Outcome]) -> str:
    if any(not math.isfinite(loss) for outcome in found for loss in outcome.losses):
        return "a loss that is not finite"
    if any(norm is not None and not math.isfinite(norm) for outcome in found for norm in outcome.norms):
        return "a gradient norm that is not finite"
    if not all(finite for outcome in found for finite in outcome.terms):
        return "a term that is not finite"
    bad = {name for outcome in found for line in outcome.logged for name, value in line.items()
           if name.endswith(" loss") and not math.isfinite(value)}  # fmt: skip
    return f"in the log a {sorted(bad)[0]} that is not finite" if bad else ""


def _silent(combination: Combination, found: list[Outcome]) -> str:
    """Settings that were given and had no effect, in silence."""
    steps = max(len(outcome.norms) for outcome in found)
    if not steps:
        return ""  # --skip-train
    names = {name for outcome in found for line in outcome.logged for name in line}
    trains = any(any(outcome.strength) for outcome in found)
    if trains and not any(outcome.terms for outcome in found):
        return "SimReg trains and computed no term"
    if _is_on(combination) and not trains and "--simreg-objective=none" not in combination.ours:
        return "SimReg is asked for and trains in no step"
    if _is_on(combination) and not any(name.endswith(" loss") for name in names):
        return "SimReg is on and not in the log"
    stepped = any(norm is not None for outcome in found for norm in outcome.norms)
    if "--adagc" in combination.ours and stepped and not any(name.startswith("adagc") for name in names):
        return "AdaGC is on and not in the log"
    return ""


def _is_on(combination: Combination) -> bool:
    """Return whether SimReg is asked for at all: with a lambda, several objectives with weights, or to measure."""
    given = _given(combination)
    objective, weight = given.get("--simreg-objective", "simreg"), given.get("--simreg-lambda", "0")
    return objective == "none" or ":" in objective or weight == "auto" or bool(float(weight))


def _objective(combination: Combination) -> str:
    objective = _given(combination).get("--simreg-objective", "simreg")
    if ":" in objective:
        return "several"
    return objective if _is_on(combination) else "lambda 0"


def _signature(failed: Outcome) -> str:
    return f"{failed.error} in {failed.place}: {pattern(failed.said)}"


def pattern(said: str) -> str:
    """Words without the numbers, names in quotes and folders that differ from run to run."""
    said = re.sub(r"/\S+/(?=saved|nowhere|tensorboard|profile)", "FOLDER/", said.strip().partition("\n")[0])
    said = re.sub(r"'[^']*'", "'...'", said)
    return re.sub(r"-?\d[\d.]*(e[-+]?\d+)?", "N", said)[:300]
