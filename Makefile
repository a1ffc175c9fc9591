# Two commands on a fresh machine with Python >= 3.11 and make: `make quickstart`, `make test`.
# Versions are pinned in constraints.txt. VENV_PYTHON=python3.13 makes $(VENV) with that one.
# JAX_PLATFORMS=cuda,cpu (say) runs both on an accelerator.

VENV ?= .venv
BIN := $(VENV)/bin
NEWEST ?= .venv-newest
RESULTS ?= build/benchmarks
PIP := $(BIN)/python -m pip --disable-pip-version-check
JAX_PLATFORMS ?= cpu
export JAX_PLATFORMS
# libtpu only compiles here: it need not look for TPUs on the network
export TPU_SKIP_MDS_QUERY = 1

.DEFAULT_GOAL := help
.PHONY: help quickstart test lint types pytest optimised newest nightly gpu macos tpu-aot cuda-aot hardening bench benchmarks tables docs \
  docs-serve dist package clean

help:
	@echo "make quickstart   set up $(VENV), install, check every operation on this machine"
	@echo "make test         lint, types, tests and doctests, and a few tests as users compile them and with the newest JAX"
	@echo "make optimised    some of every family with XLA's usual optimisations, which the others do without"
	@echo "make newest       those with the newest JAX and Triton alone, in $(NEWEST)"
	@echo "make nightly      the same with JAX's pre-release, where pip finds one (PIP_EXTRA_INDEX_URL)"
	@echo "make gpu          what belongs on an NVIDIA GPU: the tests marked gpu, and every operation's check"
	@echo "make macos        a short list of tests, without Triton and libtpu"
	@echo "make tpu-aot      compile every TPU kernel for v4, v5e, v5p and v6e, and print its roofline"
	@echo "make cuda-aot     compile more of the kernels for NVIDIA GPUs, without one"
	@echo "make hardening    ten thousand calls with an odd argument, and many legal ones, against the definitions"
	@echo "make bench        measure attention against peers on this machine"
	@echo "make benchmarks   measure everything; the numbers go to $(RESULTS), RESULTS=benchmarks/results is where the docs read them"
	@echo "make tables       regenerate tables in READMEs, code in pages, and stubs of functions whose results differ"
	@echo "make docs         build the site into build/site"
	@echo "make docs-serve   show it, and build it again when a page changes"
	@echo "make dist         build the wheel and the source distribution into dist"
	@echo "make package      install each into an environment of its own, and check every operation from there"
	@echo "make clean        remove $(VENV), $(NEWEST), caches and build outputs"

quickstart: $(VENV)/installed
	$(BIN)/ejkernel verify

# installing mostly waits for downloads, and pyright has one core: two at a time. The tests take all cores
test:
	$(MAKE) -j 2 lint types $(NEWEST)/installed
	$(MAKE) pytest
	$(MAKE) optimised
	$(MAKE) newest

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-test
	$(BIN)/pyright --pythonpath $(BIN)/python

# compiling keeps one core busy, so workers pay
pytest: $(VENV)/installed-test
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadgroup

# a few of every family as users compile them: tests/conftest.py asks XLA for its lowest level, unless one is given
optimised: $(VENV)/installed-test
	XLA_FLAGS="$(XLA_FLAGS) --xla_backend_optimization_level=3" \
	  $(BIN)/python -m pytest -n auto --maxprocesses 8 @tests/sample.txt

# each kernel once, in its interpreter or lowered, with the newest versions that this machine's newest Python has
newest: $(NEWEST)/installed
	$(NEWEST)/bin/python -m pytest -n auto --maxprocesses 8 @tests/newest.txt

# the first names the line that imports what JAX has no more
nightly: $(NEWEST)/installed-nightly
	$(NEWEST)/bin/python -m pytest tests/test_private_names.py
	$(NEWEST)/bin/python -m pytest -n auto --maxprocesses 8 @tests/newest.txt

# tests share the device's memory: each takes what it needs. PYTHON=python3 runs them in an environment that is there
GPU_PYTHON := $(or $(PYTHON),$(BIN)/python)
gpu: $(if $(PYTHON),,$(VENV)/installed-gpu)
	JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false \
	  $(GPU_PYTHON) -m pytest -p no:benchmark -n auto --maxprocesses 16 -m gpu tests
	JAX_PLATFORMS=cuda,cpu $(GPU_PYTHON) -m ejkernel verify

macos: $(VENV)/installed-macos
	$(BIN)/python -m pytest -n auto @tests/sample.txt tests/types/test_mask_info.py
	$(BIN)/ejkernel verify

tpu-aot: $(VENV)/installed-test
	$(BIN)/python -m pytest -n auto --maxprocesses 8 -m tpu_aot tests
	$(BIN)/ejkernel roofline

cuda-aot: $(VENV)/installed-test
	$(BIN)/python -m pytest -n auto --maxprocesses 8 -m cuda_aot_more tests

# some hundreds of these are part of `make test`
hardening: $(VENV)/installed-test
	EJKERNEL_ODD_CALLS=10000 EJKERNEL_EXAMPLES=40 $(BIN)/python -m pytest -n auto --maxprocesses 8 tests/hardening

bench: $(VENV)/installed-bench
	$(BIN)/python -m benchmarks softmax --json bench.json --plot bench.png

# on a CPU fewer and smaller cases: minutes
benchmarks: $(VENV)/installed-bench
	$(BIN)/python -m benchmarks all --folder $(RESULTS)

tables: $(VENV)/installed-test
	$(BIN)/python -m benchmarks.readme_tables --write
	$(BIN)/python tests/stubs.py --write
	$(BIN)/python docs/quotes.py
	$(BIN)/python docs/names.py
	$(BIN)/python docs/chart.py

# the notice is of the successor of mkdocs-material
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-serve: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

dist: $(VENV)/installed-test
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

# from a folder of its own, so that nothing of the checkout is imported
package: dist
	rm -rf build/package
	for file in dist/*.whl dist/*.tar.gz; do \
	  $(BIN)/python -m venv --clear build/package && \
	  build/package/bin/python -m pip --disable-pip-version-check install --no-compile -c constraints.txt $$file && \
	  (cd build/package && bin/ejkernel --version && bin/ejkernel verify) || exit 1; \
	done

clean:
	rm -rf $(VENV) $(NEWEST) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call create_venv,folder,commands): with the first command that is a Python >= 3.11 and runs
define create_venv
	@python=$$(for p in $(2); do \
	    $$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; \
	  done); \
	if [ -z "$$python" ]; then echo "make: no Python >= 3.11 with venv found" >&2; exit 1; fi; \
	echo "creating $(1) with $$($$python --version)"; \
	$$python -m venv $(1)
endef

$(VENV)/bin/python:
	$(call create_venv,$(VENV),$(VENV_PYTHON) python3.11 python3 python3.12 python3.13 python3.14 python)

$(NEWEST)/bin/python:
	$(call create_venv,$(NEWEST),python3.14 python3.13 python3.12 python3.11 python3 python)

# without --no-compile, pip compiles every module there is; Python does so for those that are imported
$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --no-compile -c constraints.txt -e .
	@touch $@

$(VENV)/installed-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --no-compile -c constraints.txt -e ".[test,torch]"
	@touch $@

$(VENV)/installed-gpu: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --no-compile -c constraints.txt -e ".[test,torch,cuda]" "jax[cuda13]"
	@touch $@

# neither Triton nor libtpu has a build for it
$(VENV)/installed-macos: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --no-compile -c constraints.txt -e . beartype hypothesis pytest pytest-xdist
	@touch $@

$(VENV)/installed-bench: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install -c constraints.txt -e . matplotlib
	@touch $@

$(VENV)/installed-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install -c constraints.txt -e ".[$*]"
	@touch $@

$(NEWEST)/installed: pyproject.toml constraints-newest.txt | $(NEWEST)/bin/python
	$(NEWEST)/bin/python -m pip --disable-pip-version-check install --no-compile -c constraints-newest.txt \
	  -e ".[cuda]" hypothesis pytest pytest-xdist
	@touch $@

# beyond the version that this package's metadata ends at
$(NEWEST)/installed-nightly: $(NEWEST)/installed
	$(NEWEST)/bin/python -m pip --disable-pip-version-check install --no-compile --pre --upgrade --no-deps jax jaxlib
	@touch $@
