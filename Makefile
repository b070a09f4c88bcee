# `make demo` and `make test` are the two commands of the README; each needs only Python >= 3.11, make and git.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
# Of `make gpu-test`, each with a context on the GPU; what measures the whole GPU's memory runs alone afterwards.
GPU_WORKERS ?= 8
KILLED_LOADS := tests/loader/driver/test_driver.py::test_a_load_that_is_killed_at_any_moment_leaves_nothing_on_the_gpu
WHOLE_GPU := tests/loader/run/test_capture_memory.py $(KILLED_LOADS)
# What `make fuzz` takes in all, and how many bundles `make fuzz-random` corrupts.
SECONDS ?= 3600
COUNT ?= 1000000

PY := $(VENV)/bin/python
# The name of the stamp is the content of what it stands for: a second run installs nothing, an edit installs again.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | git hash-object --stdin)
SOURCES := api ir kernels builder loader

# Registries and clients of others that tests and the demo run against, where `make tools` could fetch them.
TOOLS ?= $(CURDIR)/build/tools
export PRECAST_TEST_TOOLS ?= $(TOOLS)/bin

# The repository root stays off sys.path: `kernels` or `ir` must be importable as precast.kernels and precast.ir only.
export PYTHONSAFEPATH := 1

.DEFAULT_GOAL := help
.PHONY: help install tools demo registry-demo test check lint format types gpu-test bench fuzz fuzz-random models clean

help:
	@echo "make demo      build, load and run the example model"
	@echo "make registry-demo  a release by way of a registry: build, push, sign, attest, pull, verify, recite"
	@echo "make test      the tests that need no GPU"
	@echo "make tools     docker-registry, skopeo, oras, crane and cosign, for tests and the demo of registries"
	@echo "make check     lint, format, types, tests: what must pass before a change lands"
	@echo "make format    rewrite the sources in the format that check asks for"
	@echo "make gpu-test  the tests that need a GPU"
	@echo "make bench     all benchmarks, and the pages' figures"
	@echo "make fuzz      coverage-guided fuzzing of all readers, SECONDS=3600 in all"
	@echo "make fuzz-random  COUNT=1000000 random corruptions of a bundle"
	@echo "make models    every model type of transformers, compared; writes docs/models.md"
	@echo "make clean     remove what make made, .venv included"

install: $(STAMP)

# torch comes first and alone: it is most of the bytes, and which build of it fits is the machine's matter.
$(STAMP): | $(PY)
	rm -f $(VENV)/.installed-*
	$(PY) -m pip install -c constraints.txt torch==2.13.0
	$(PY) -m pip install -c constraints.txt -e '.[build,sign,dev]'
	touch $@

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

demo: $(STAMP)
	$(PY) examples/recite/demo.py

# Where something can't be had, it says so and goes on.
tools: | $(PY)
	$(PY) tests/support/real_tools.py $(TOOLS)

registry-demo: $(STAMP) tools
	$(PY) examples/registry/demo.py

test: $(STAMP)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal --durations 15 -m "not gpu"

check: lint types test

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(STAMP)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# The links are made anew each time, so that a file that was removed leaves none behind. pyright does not follow linked
# folders by itself, and finds no fault where it finds no file: it gets the list.
types: $(STAMP)
	rm -rf build/types
	mkdir -p build/types/precast
	for file in api/*; do ln -s "../../../$$file" build/types/precast/; done
	for room in ir kernels builder loader; do ln -s "../../../$$room" build/types/precast/; done
	rm -f build/types/precast/__pycache__
	$(PY) -m mypy -p precast
	find -L build/types -name '*.py' | $(PY) -m pyright --pythonpath $(PY) -

gpu-test: $(STAMP)
	$(PY) -m pytest -m gpu -n $(GPU_WORKERS) --dist worksteal $(WHOLE_GPU:%=--deselect %)
	$(PY) -m pytest -m gpu $(WHOLE_GPU)

bench: $(STAMP)
	set -e; for file in benchmarks/bench_*.py; do echo "== $$file"; PYTHONPATH=benchmarks $(PY) "$$file"; done
	$(PY) benchmarks/figures.py

fuzz: $(STAMP)
	$(PY) -c 'import atheris' 2>/dev/null || $(PY) -m pip install -c constraints.txt -e '.[fuzz]'
	$(PY) tests/fuzz/run.py fuzz --seconds $(SECONDS) $(TARGETS)

fuzz-random: $(STAMP)
	$(PY) tests/fuzz/run.py bundles 0 $(COUNT)

# With ONLY="llama qwen3" these types alone, and no page; with ONLY="--write llama" this row of the page.
models: $(STAMP)
	PYTHONPATH=tests/support $(PY) -m models_page --workers $(WORKERS) $(ONLY)

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(SOURCES) tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
