# Two commands set everything up on a fresh machine (Python 3.11+ and make):
#   make demo   fine-tunes a tiny GLM on generated data, in about two minutes on 2 CPU cores
#   make test   runs the whole suite, and what a processor could change as other kinds of machine, too
#   make prove  runs the proofs in full, of which the suite runs a part: minutes each
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test prove lint format clean

demo: $(VENV)/.core
	$(BIN)/glm-accelerate demo

test: $(VENV)/.dev lint
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --junitxml=build/tests.xml
	$(BIN)/python tests/kinds.py build/tests.xml

prove: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m prove --timeout 1400 -o faulthandler_timeout=1500

lint: $(VENV)/.dev
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/basedpyright --pythonpath $(BIN)/python --level error

format: $(VENV)/.dev
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist
