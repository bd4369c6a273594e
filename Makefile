# Everything a contributor runs. The environment is made once, and again when what it is made of changes.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
BROWSER := .venv/.browser

.PHONY: demo test test-slow bench zoo docs format clean

demo: $(READY)
	$(BIN)/betternorm demo --output build/demo

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q -n 2 --dist loadfile

test-slow: $(READY) $(BROWSER)
	$(BIN)/pytest -q -m slow

bench: $(READY)
	$(BIN)/python -m benchmarks

# Every architecture of timm with BatchNorm, about an hour; it goes on where it was interrupted.
zoo: $(READY)
	mkdir -p build
	$(BIN)/python benchmarks/zoo.py --json build/zoo.json

# Not quietly: mkdocs then counts no warnings, and --strict has nothing to go by.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist site .mypy_cache .pytest_cache .ruff_cache

# Without build isolation: a build environment of its own would fetch a second torch.
$(READY): pyproject.toml constraints.txt hatch_build.py $(wildcard src/betternorm/backends/cpu/*.cpp src/betternorm/backends/cpu/*.h)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt hatchling editables
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

# A real browser for the slow tests. Where the system's package cannot be installed, they say so and are skipped.
$(BROWSER): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt playwright axe-playwright-python
	command -v chromium >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; } || \
		echo 'chromium is missing and apt-get cannot install it: the browser tests will be skipped' >&2
	touch $@
