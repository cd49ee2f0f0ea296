# SPDX-License-Identifier: Apache-2.0
"""A Megatron without a seam is a named error; wrapped functions come back."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from simreg_megatron import SimRegConfig
from simreg_megatron.plugin import compat, model
from simreg_megatron.plugin import installation as state
from simreg_megatron.plugin.hooks import install, uninstall
from simreg_megatron.plugin.installation import Installation


class OldModel:
    def forward(self) -> None: ...


class OddModel:
    def _postprocess(self, hidden_states) -> None: ...


class FitModel:
    def _postprocess(self, hidden_states, labels) -> str:
        return "own"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("pretended_megatron")
    made.OldModel, made.OddModel, made.FitModel = OldModel, OddModel, FitModel
    monkeypatch.setitem(sys.modules, "pretended_megatron", made)
    monkeypatch.setattr(compat, "megatron_version", lambda: "0.12.3")
    return made


def seam(owner: str | None, name: str = "_postprocess", module: str = "pretended_megatron") -> compat.Seam:
    return compat.Seam(module, owner, name, "states meet labels", frozenset({"hidden_states", "labels"}))


MISSING = [
    (seam("OldModel"), "it has no pretended_megatron.OldModel._postprocess"),
    (seam("NoModel"), "it has no pretended_megatron.NoModel._postprocess"),
    (seam("OddModel"), "does not take labels"),
    (seam(None, module="no_such_megatron"), "cannot import no_such_megatron"),
]


@pytest.mark.parametrize(("broken", "what"), MISSING)
def test_a_missing_seam_names_the_release_and_the_way_out(module: ModuleType, broken: compat.Seam, what: str) -> None:
    with pytest.raises(compat.MegatronSeamError, match=what) as caught:
        broken.holder()
    assert "megatron-core 0.12.3" in str(caught.value) and "use megatron-core" in str(caught.value)


def test_a_package_that_megatron_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Source trees up to 0.16 import packages that nothing installs: another Megatron would not help."""
    (tmp_path / "needy_megatron.py").write_text("import no_such_package.part")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(compat.MegatronSeamError, match="; install no_such_package "):
        seam(None, module="needy_megatron").holder()


def test_a_restarted_run_starts_over() -> None:
    """Megatron can restart a run inside the process, with new groups: nothing of the old run may be left."""
    installation = Installation(SimRegConfig(lambda_=1), lambda config: ())
    first = installation.regularizer()
    assert installation.regularizer() is first
    second = installation.begin_run()
    assert second is not first and installation.regularizer() is second


def test_a_wrapper_that_passes_everything_on_is_no_obstacle(module: ModuleType, monkeypatch) -> None:
    """Someone else's `def wrapper(*args, **kwargs)` hides the parameters; names are read from the call then."""
    inner = FitModel._postprocess
    monkeypatch.setattr(FitModel, "_postprocess", lambda *args, **kwargs: inner(*args, **kwargs))
    assert replace(seam("FitModel"), called_by_keyword=True).holder() is FitModel
    with pytest.raises(compat.MegatronSeamError, match="does not take hidden_states, labels"):
        seam("FitModel").holder()  # called by position, its arguments would have no names
    named = compat.named_arguments(FitModel._postprocess, "model", hidden_states=1, labels=2)
    assert named["hidden_states"] == 1 and named["labels"] == 2
    plain = compat.named_arguments(inner, "model", 1, labels=2)
    assert plain == {"self": "model", "hidden_states": 1, "labels": 2}


@pytest.mark.megatron
def test_a_new_release_is_installed_into_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "megatron_version", lambda: "0.99.0")
    with pytest.warns(UserWarning, match="not been tried with megatron-core 0.99.0") as caught:
        install(SimRegConfig(lambda_=1))
    uninstall()
    assert len([warning for warning in caught if "not been tried" in str(warning.message)]) == 1


@pytest.mark.megatron
def test_an_installation_that_fails_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.gpt import GPTModel

    def fails(classes: object) -> None:
        raise RuntimeError("half way")

    before = GPTModel._postprocess, GPTModel.__init__, GPTModel.forward
    monkeypatch.setattr(model, "watch_built", fails)
    with pytest.raises(RuntimeError, match="half way"):
        install(SimRegConfig(lambda_=1))
    assert (GPTModel._postprocess, GPTModel.__init__, GPTModel.forward) == before
    monkeypatch.undo()
    install(SimRegConfig(lambda_=2))  # not "with other settings already"
    uninstall()


def test_flags_that_were_parsed_before_are_no_silent_lambda_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "has_training_loop", lambda: True)
    monkeypatch.setattr(compat, "arguments", lambda: SimpleNamespace(lr=1.0))
    with pytest.raises(RuntimeError, match=r"flags already, without those of SimReg: call install\(\) before"):
        install()
    assert state.installed() is None


def test_a_training_loop_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(compat.MegatronSeamError, match="cannot import no_such_loop"):
        replace(compat.STEP_SEAM, module="no_such_loop").holder()


def test_a_later_wrapper_is_not_cut_off(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FitModel._postprocess
    installation = Installation(None, lambda config: ())
    installation.wrap(FitModel, "_postprocess", lambda inner, *args: inner(*args))
    monkeypatch.setattr(FitModel, "_postprocess", original)
    monkeypatch.setattr(OddModel, "_postprocess", OddModel._postprocess)  # so that it comes back
    installation.wrap(OddModel, "_postprocess", lambda inner, *args: inner(*args))
    ours = OddModel._postprocess
    with pytest.raises(RuntimeError, match="wrapped again after SimReg"):
        installation.unwrap_all()
    assert OddModel._postprocess is ours, "all or nothing"
