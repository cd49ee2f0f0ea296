# SPDX-License-Identifier: Apache-2.0
# simreg-megatron in NVIDIA's PyTorch container, which has torch, Transformer Engine and Apex built for its GPUs.
# In the clone's folder:
#     docker build --tag simreg-megatron .
#     docker run --gpus all --ipc=host --rm simreg-megatron simreg-megatron doctor --gpu
# Not built yet: it was written on a machine without a container engine, a GPU or this image. A test copies the same
# files and builds the wheel from them; whether the image's own packages fit these requirements is not known.
# launch/simreg.def is the same for Apptainer.
ARG BASE=nvcr.io/nvidia/pytorch:25.06-py3
FROM ${BASE}

WORKDIR /opt/simreg-megatron
COPY setup.py pyproject.toml README.md LICENSE ./
COPY simreg_megatron simreg_megatron
COPY launch launch
COPY examples examples
COPY tools tools

# --no-deps where a package asks for torch: the container's own is not on the package index and must stay.
RUN python tools/extra.py DATA REPORT >/tmp/requirements.txt && pip install --no-cache-dir -r /tmp/requirements.txt
RUN python tools/extra.py MEGATRON >/tmp/megatron.txt && pip install --no-cache-dir --no-deps -r /tmp/megatron.txt
RUN pip install --no-cache-dir --no-deps .
