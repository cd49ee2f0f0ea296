# SPDX-License-Identifier: Apache-2.0
"""A Transformer Engine that is found and cannot be imported is named, with the way out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from simreg_megatron.installed import broken_transformer_engine


@pytest.fixture
def not_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget again what a test imports under these names."""
    names = ("transformer_engine", "transformer_engine.pytorch")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("not_imported")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", None),
        ("raise OSError('lib.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal')", "nvidia-cublas>=13.2"),
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", "built for another torch or CUDA"),
        ("raise RuntimeError", "built for another torch or CUDA"),
        (
            "raise OSError('te.so: undefined symbol: x, version libcudnn_graph.so.9')",
            "another cuDNN than torch: set CUDNN",
        ),
    ],
)
def test_the_reason_is_named(text: str, sentence: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pytorch.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = broken_transformer_engine()
    assert found is None if sentence is None else sentence in str(found)


@pytest.mark.usefixtures("not_imported")
@pytest.mark.parametrize("given", ["", "CUDNN_HOME", "CUDNN_PATH"])
def test_transformer_engine_loads_the_cudnn_of_torch(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader looks at CUDNN_HOME, then CUDNN_PATH, then at the system, and only then at torch's."""
    for name in ("nvidia", "nvidia.cudnn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        monkeypatch.setenv(name, "/usr/local/cudnn") if name == given else monkeypatch.delenv(name, raising=False)
    (tmp_path / "nvidia" / "cudnn").mkdir(parents=True)
    (tmp_path / "nvidia" / "cudnn" / "__init__.py").touch()
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    (tmp_path / "transformer_engine" / "pytorch.py").write_text(
        "import os; raise OSError(os.environ.get('CUDNN_HOME') or os.environ['CUDNN_PATH'])"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert ("/usr/local/cudnn" if given else f"{tmp_path}/nvidia/cudnn") in str(broken_transformer_engine())
    monkeypatch.delenv("CUDNN_HOME", raising=False)
