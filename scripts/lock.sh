#!/usr/bin/env bash
# Writes requirements.lock: one version of everything that gspo and its extras need, for Python 3.11 to 3.13 on every
# platform. vllm is left out: it needs its own version of torch. The file names no place to download from.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=(data tasks lora quant tensorboard wandb trackio report ray serve test docs check)
uv pip compile pyproject.toml "${extras[@]/#/--extra=}" --universal --no-emit-index-url --no-header --no-annotate --quiet \
  --output-file requirements.lock "$@"
