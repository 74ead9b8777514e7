#!/usr/bin/env bash
# Writes requirements.lock: one version of everything that gspo and its extras need, for Python 3.11 to 3.13 on every
# platform. vllm is left out: it needs its own version of torch. The file names no place to download from.
set -euo pipefail
cd "$(dirname "$0")/.."
mapfile -t extras < <(python - <<'PYTHON'
import tomllib

extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print("\n".join(name for name in extras if name != "vllm"))
PYTHON
)
uv pip compile pyproject.toml "${extras[@]/#/--extra=}" --universal --no-emit-index-url --no-header --no-annotate --quiet \
  --output-file requirements.lock "$@"
