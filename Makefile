# Everything a contributor runs. The environment is made once, and again when what it is made of changes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
SLOW := $(VENV)/.slow

KERNELS := $(wildcard src/betternorm/backends/cpu/*.cpp src/betternorm/backends/cpu/*.h)
PIP := $(BIN)/pip install --constraint constraints.txt --no-compile # Python compiles what is imported; pip would compile all
STEP := $(PYTHON) tools/step.py

.PHONY: demo test matrix test-slow bench zoo docs format clean

demo: $(DEMO)
	@$(BIN)/betternorm demo --output build/demo

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q -n 2 --dist loadfile

# The tests in every Python that is claimed, as far as it is here.
matrix:
	@for version in 3.10 3.11 3.12 3.13 3.14; do \
		python$$version -c "" 2>/dev/null || { echo "python$$version is not here"; continue; }; \
		$(MAKE) test PYTHON=python$$version VENV=.venv-$$version || exit 1; \
	done

# One after the other: two Ray clusters that start at once on one machine take each other's ports.
test-slow: $(SLOW)
	$(BIN)/pytest -q -m slow

bench: $(READY)
	$(BIN)/python -m benchmarks

# Every architecture of timm with BatchNorm, about an hour; it goes on where it was interrupted.
zoo: $(READY)
	mkdir -p build
	$(BIN)/python -m betternorm_lab.studies.zoo --json build/zoo.json

# Not quietly: mkdocs then counts no warnings, and --strict has nothing to go by.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-* build dist site .mypy_cache .pytest_cache .ruff_cache

# Without build isolation: a build environment of its own would fetch a second torch. torch comes first, because the
# kernels are compiled against its headers.
$(DEMO): pyproject.toml lab/pyproject.toml constraints.txt hatch_build.py $(KERNELS)
	@echo 'setting up, once: an environment in $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@$(STEP) 'installing torch' $(PIP) torch numpy hatchling editables
	@$(STEP) 'installing betternorm and compiling its kernels' $(PIP) --no-build-isolation --editable . --editable lab
	@$(BIN)/python -c 'from betternorm import backends; print(backends.status())'
	@touch $@

$(READY): $(DEMO)
	@$(STEP) 'installing what the tests use' $(PIP) --no-build-isolation --editable '.[dev]' --editable 'lab[all]'
	@touch $@

# What the slow tests use beside: Triton, a gigabyte, whose interpreter runs the GPU kernels without a GPU, and a real browser.
# Where the system's package of that cannot be installed, its tests say so and are skipped.
$(SLOW): $(READY)
	@$(STEP) 'installing what the slow tests use' $(PIP) playwright axe-playwright-python 'triton; sys_platform == "linux"'
	command -v chromium >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; } || \
		echo 'chromium is missing and apt-get cannot install it: the browser tests will be skipped' >&2
	@touch $@
