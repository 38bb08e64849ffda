# Everything from a bare Python >= 3.11 with pip: `make run` trains and checkpoints, `make test` checks the project.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: run test lint bench faults clean

run: $(VENV)/.installed
	$(BIN)/capricorn-bench run --model mixtral-small --ckpt every-iter

# Two at once, each with files of its own: many tests wait for processes that they have started.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Every kind of failure twice; fails unless Capricorn goes on bit for bit wherever a copy survives.
faults: $(VENV)/.installed
	$(BIN)/capricorn-bench faults --count 42 --out build/faults

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Stamps, so that only a change of the requirements installs again; the install is editable and follows the sources.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python 3.11 or newer is needed, and '$(PYTHON)' is none; name one: make PYTHON=/path/to/python3.12" >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[dev,peers]'
	@touch $@
