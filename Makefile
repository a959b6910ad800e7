# Every developer command, once. Each target does all it needs from a fresh clone;
# another interpreter is chosen with make PYTHON=python3.12 <target>.

PYTHON ?= python3
# A release of torch beside the one of constraints.txt, given to make; it has its own environment.
TORCH  :=
VENV   ?= .venv$(if $(TORCH),-torch-$(TORCH))
BIN    := $(VENV)/bin
BENCH  := .venv-bench
DIST   := .venv-dist
READY  := $(VENV)/.ready
# Trainers that only make test-all installs.
MORE   := $(VENV)/.integrations
DEMO   := .demo
# What the checks build of the documentation, for the tests to look at.
SITE   := $(VENV)/site
# The first thing to install is a new pip: that of Python 3.11 knows no groups.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# Tests run in four processes on two cores, since many wait; one that is free takes tests over.
PARALLEL ?= -n 4 --dist worksteal

# Each test that starts a Python would compile the library anew; setup leaves that to the first.
unexport PYTHONDONTWRITEBYTECODE
# Silences an advertisement of the documentation theme.
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-torch check check-types check-lint check-layers check-docs check-tests docs servers bench bench-quick bench-compare bench-publish pictures bench-local bench-interference bench-scale bench-stall bench-gpu dist format clean

help:  ## Show these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## Train, kill, resume, and compare the two runs
	@mkdir -p $(DEMO)
	@$(BIN)/python examples/demo.py --picture $(DEMO)/losses.png
	@echo "demo: the plot is $(abspath $(DEMO))/losses.png"

test: check  ## All checks and the tests
	@echo "test: pytest"
	@CKPIPE_TEST_SITE=$(abspath $(SITE)) $(BIN)/python -m pytest -q $(PARALLEL)

test-all: check $(MORE)  ## All checks and the tests in their long form
	@echo "test: pytest, long form"
	@CKPIPE_TEST_ALL=1 CKPIPE_TEST_SITE=$(abspath $(SITE)) $(BIN)/python -m pytest -q $(PARALLEL)

test-torch: $(if $(TORCH),$(READY))  ## The tests with another torch: make test-torch TORCH=2.10.0
	@[ -n "$(TORCH)" ] || \
		{ echo "test: give the release of torch, as in make test-torch TORCH=2.10.0" >&2; exit 1; }
	@echo "test: pytest, with torch $(TORCH)"
	@$(BIN)/python -m pytest -q $(PARALLEL)

check: $(READY)  ## Lint, formatting, types, layers, docs, imports of the tests
	@$(MAKE) --no-print-directory --jobs=2 check-types check-lint check-layers check-docs check-tests

check-types:
	@echo "check: mypy"
	@$(BIN)/mypy --no-error-summary

check-lint:
	@echo "check: ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || \
		{ echo "check: some files are not formatted; make format does it" >&2; exit 1; }

check-layers:
	@echo "check: import layers"
	@$(BIN)/lint-imports --no-logo >$(VENV)/layers.log 2>&1 || { cat $(VENV)/layers.log >&2; exit 1; }

# With --quiet, mkdocs counts no warnings, so --strict would let them pass.
check-docs:
	@echo "check: docs"
	@$(BIN)/mkdocs build --strict --site-dir $(SITE) >$(VENV)/docs.log 2>&1 || { cat $(VENV)/docs.log >&2; exit 1; }

# This compiles all that tests import, while mypy keeps one core busy; else each of the processes
# that run tests would do so.
check-tests:
	@echo "check: tests are found"
	@$(BIN)/python -m pytest -q --collect-only >$(VENV)/tests.log 2>&1 || { cat $(VENV)/tests.log >&2; exit 1; }

docs: $(READY)  ## Build the documentation into site/
	@$(BIN)/mkdocs build --strict --site-dir site >$(VENV)/docs.log 2>&1 || { cat $(VENV)/docs.log >&2; exit 1; }
	@echo "docs: open $(abspath site)/index.html"

servers: $(READY)  ## Start an S3 server and a GCS emulator on this machine, to try things against
	@$(BIN)/python tests/support/servers.py

bench-local: $(READY)  ## Measure saving and loading on this machine's disk
	@$(BIN)/python benchmarks/local.py

bench-interference: $(READY)  ## Measure what a training loop feels of saves, in thread and process
	@$(BIN)/python benchmarks/interference.py

bench-scale: $(READY)  ## Measure planning and committing for up to 16,384 made-up ranks
	@mkdir -p .bench
	@$(BIN)/python benchmarks/scale.py --json .bench/scale.json --plots .bench

bench-stall: $(READY)  ## Measure what saves cost the loop that trains (three minutes)
	@$(BIN)/python benchmarks/stall.py

bench-gpu: $(READY)  ## Measure copies from a GPU and what steps lose beside them (needs CUDA)
	@$(BIN)/python benchmarks/gpu.py

bench: $(BENCH)/.ready  ## Measure against every peer, in about an hour; CONTINUE=1 takes up a run
	@mkdir -p .bench
	@$(BENCH)/bin/python benchmarks/compare.py $(if $(CONTINUE),--continue) --json .bench/compare.json --plots .bench

bench-quick: $(BENCH)/.ready  ## The same in two minutes: a smaller state, one loop, one round
	@mkdir -p .bench
	@$(BENCH)/bin/python benchmarks/compare.py --quick --json .bench/quick.json --plots .bench

bench-publish: $(BENCH)/.ready  ## Put tables and plots of make bench into README and docs
	@$(BENCH)/bin/python benchmarks/comparison_report.py --publish .bench/compare.json

pictures: $(READY)  ## Draw plots from committed results, and the pictures of the documentation
	@$(BIN)/python benchmarks/plots.py
	@PYTHONPATH=benchmarks $(BIN)/python docs/pictures.py
	@echo "pictures: docs/plots and docs/pictures"

bench-compare: $(BENCH)/.ready  ## What changed beyond the spread: make bench-compare OLD=old.json
	@$(BENCH)/bin/python benchmarks/comparison_report.py $(OLD) .bench/compare.json

dist: $(DIST)/.ready  ## Build, check and try a release of the last commit: make dist REPOSITORY=https://...
	@CKPIPE_REPOSITORY="$(REPOSITORY)" $(DIST)/bin/python make_dist.py
	@$(DIST)/bin/python make_dist.py try

format: $(READY)  ## Format the code and apply safe fixes
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

clean:  ## Remove all that these targets made, environments included
	@rm -rf $(patsubst %/.ready,%,$(wildcard $(READY) $(BENCH)/.ready $(DIST)/.ready .venv-torch-*/.ready)) \
		$(DEMO) .bench site dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment with .ready in it is make's own. That file is there from the start, older than any
# other, so that a setup that failed or was interrupted is taken up again.
.PRECIOUS: $(READY) $(BENCH)/.ready $(DIST)/.ready
define own
@[ ! -e $(@D) ] || [ -e $@ ] || \
	{ echo "setup: $(@D) was not made by make, which installs nothing into it;" \
	"remove it$(if $(filter $@,$(READY)), or name another with make VENV=...)" >&2; exit 1; }
@[ -e $@ ] || { mkdir -p $(@D) && touch -t 197001020000 $@; }
endef

$(READY): pyproject.toml constraints.txt hatch_build.py ckpipe/memory/_native.c
	@command -v $(PYTHON) >/dev/null || \
		{ echo "setup: no $(PYTHON) here; give one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "setup: ckpipe needs Python 3.11 or newer, and this is $$($(PYTHON) --version);" \
		"give another with make PYTHON=..." >&2; exit 1; }
	$(own)
	@echo "setup: $(VENV) with $$($(PYTHON) --version), which takes a minute$(if $(TORCH), and several GB)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(INSTALL) --upgrade pip
	@$(BIN)/python $(INSTALL) \
		$(if $(TORCH),torch==$(TORCH),-c constraints.txt) -e '.[all]' --group dev --group docs
	@touch $@

$(MORE): $(READY)
	@echo "setup: $(VENV), with the trainers of the group integrations"
	@$(BIN)/python $(INSTALL) \
		$(if $(TORCH),torch==$(TORCH),-c constraints.txt) -e . --group integrations
	@touch $@

$(BENCH)/.ready: pyproject.toml constraints.txt hatch_build.py ckpipe/memory/_native.c
	$(own)
	@echo "setup: $(BENCH), with the peers"
	@$(PYTHON) -m venv $(BENCH)
	@$(BENCH)/bin/python $(INSTALL) --upgrade pip
	@$(BENCH)/bin/python $(INSTALL) -c constraints.txt -e . --group bench
	@touch $@

$(DIST)/.ready: pyproject.toml
	$(own)
	@echo "setup: $(DIST), with what builds a release"
	@$(PYTHON) -m venv $(DIST)
	@$(DIST)/bin/python $(INSTALL) --upgrade pip
	@$(DIST)/bin/python $(INSTALL) --group dist
	@touch $@
