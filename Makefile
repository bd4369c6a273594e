# Everything a contributor runs. The environment is made once, and again when what it is made of changes.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: test test-slow bench format clean

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q -n 2 --dist loadfile

test-slow: $(READY)
	$(BIN)/pytest -q -m slow

bench: $(READY)
	$(BIN)/python -m benchmarks

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache

# Without build isolation: a build environment of its own would fetch a second torch.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt hatchling editables
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@
