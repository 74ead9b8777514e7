# Two images from one file:
#   docker build --target cpu  -t gspo:cpu  .
#   docker build --target cuda -t gspo:cuda .
#   docker run --rm --gpus all -v "$PWD/runs:/gspo/runs" gspo:cuda train
# The wheels of torch bring CUDA with them; the host needs only the NVIDIA driver and its container toolkit.
# For a small CPU image, name PyTorch's index of CPU builds: --build-arg TORCH_INDEX=URL
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS base
# A C++ compiler for the CPU kernels and for torch.compile; tini passes signals on, so that Ctrl-C saves a checkpoint.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git tini \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /src
COPY requirements.lock pyproject.toml README.md LICENSE ./
COPY src src

FROM base AS cpu
ARG TORCH_INDEX=""
RUN if [ -n "$TORCH_INDEX" ]; then pip install -c requirements.lock --index-url "$TORCH_INDEX" torch; fi \
    && pip install -c requirements.lock ".[report,data,lora,serve]"
WORKDIR /gspo
ENTRYPOINT ["tini", "-g", "--", "gspo"]
CMD ["--help"]

FROM base AS cuda
RUN pip install -c requirements.lock ".[report,data,lora,quant,serve,ray,wandb,tensorboard]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /gspo
ENTRYPOINT ["tini", "-g", "--", "gspo"]
CMD ["--help"]
