# Trainer (.venv) and SGLang (.venv-sglang-gpu) for GPUs in one image; driver 580 or newer on the host. From the checkout:
#     docker build --tag megatron-stare .
#     enroot import --output megatron-stare.sqsh dockerd://megatron-stare:latest
#     apptainer build megatron-stare.sif docker-daemon://megatron-stare:latest
# One image serves both halves of a Slurm job: CONTAINER=pyxis:/images/megatron-stare.sqsh (slurm/README.md).
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# bubblewrap: the sandbox; rdma-core and ibverbs-providers: InfiniBand under NCCL; numactl: the binding of ranks to cores;
# a compiler and Python.h: Triton's launchers, and TransformerEngine's bindings.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap build-essential ca-certificates git ibverbs-providers \
        infiniband-diags libibverbs1 make ninja-build numactl python3.12-dev python3.12-venv rdma-core \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megatron_stare
COPY . .
ENV PIP_NO_CACHE_DIR=1
RUN make setup
RUN make gpu && rm -rf .gpu-wheels
RUN make sglang-gpu
ENV PATH=/opt/megatron_stare/.venv/bin:$PATH SGLANG_PYTHON=/opt/megatron_stare/.venv-sglang-gpu/bin/python
CMD ["python", "-m", "megatron_stare", "doctor"]
