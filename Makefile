# Two commands: `make train` and `make test`. Each makes .venv and installs what it needs when that is missing.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ARGS   ?=
# Tests run two processes side by side; more threads than cores would make them wait for each other.
TEST   := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: train test test-slow test-gpu test-browser check format scorecard docs clean

train: $(VENV)/.core
	@$(BIN)/gspo train $(ARGS)

test: $(VENV)/.test
	@$(TEST) -n 2 --dist worksteal -m "not slow and not gpu and not vllm" $(ARGS)

test-slow: $(VENV)/.test
	@$(TEST) -m "slow and not gpu and not vllm" $(ARGS)

test-gpu: $(VENV)/.test
	@$(TEST) -m gpu $(ARGS)

test-browser: $(VENV)/.test
	@$(TEST) -m browser $(ARGS)

check: $(VENV)/.check
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.check
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

scorecard: $(VENV)/.test
	@$(BIN)/python -m gspo.scorecard $(ARGS)

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

$(VENV)/bin/python:
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml | $(VENV)/bin/python
	@echo "installing gspo into $(VENV) (the first time takes a minute or two)"
	@$(PIP) -e ".[report]"
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.core | $(VENV)/bin/python
	@echo "installing what the tests need"
	@$(PIP) -e ".[test]"
	@touch $@

$(VENV)/.check: pyproject.toml $(VENV)/.test | $(VENV)/bin/python
	@echo "installing ruff and pyright"
	@$(PIP) -e ".[check]"
	@touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
