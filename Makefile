# Two commands on a fresh machine: `make demo` and `make test`. Each sets up what it needs, once.
.PHONY: demo test test-all test-faults healthy chaos lint docs cards test-docs bench bench-planner package pins clean help

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# With bytecode written, wherever it is not: the tests start hundreds of processes, and each would compile all of Argosy.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

help:
	@echo "make demo      set up, train a small model on real text for some minutes, show what it learnt"
	@echo "make test      set up, run the tests (about a quarter of an hour on 2 cores)"
	@echo "make test-all  the slow ones too"
	@echo "make test-faults  the whole matrix of faults, each at five places (an hour and a half)"
	@echo "make healthy   an hour of undisturbed training, in which no fault must be found (RUN=run.toml)"
	@echo "make chaos     a run that is killed, stopped and corrupted at random for half an hour"
	@echo "make lint      ruff, mypy (benchmarks too), the order of imports, and the rules of the house (.ci/house.py)"
	@echo "make docs      build the site (build/site), check its links, write the run file's JSON schema"
	@echo "make test-docs  run the commands of the documents (a quarter of an hour)"
	@echo "make cards     measure each model family against transformers; writes docs/families.md and .json"
	@echo "make bench     the benchmarks, side by side with their peers"
	@echo "make gpu       the first hour on a GPU: tests, parity, a 1B step beside peers, faults, probe, prediction, profile"
	@echo "make bench-planner  the planner's predictions against published runs"
	@echo "make package   the wheel and the sdist in dist/, the same bytes twice, tried outside the tree"
	@echo "make pins      write constraints.txt anew for pyproject.toml; newer versions only with UPGRADE=--upgrade"
	@echo "make clean     remove the environment and what was built (not runs/ and data/)"

demo: .venv/.core
	$(BIN)/argosy train

test: .venv/.dev
	$(PYTEST)

test-all: .venv/.dev
	$(PYTEST) -m ""

test-faults: .venv/.dev
	$(BIN)/python -m pytest tests/system/test_matrix*.py -m ""

RUN ?= demo

healthy: .venv/.dev
	$(BIN)/python benchmarks/faults/healthy.py $(RUN) --minutes 60 --train.steps 0 --train.minutes 61

chaos: .venv/.dev
	$(BIN)/argosy chaos --fault-seed 7 --minutes 30

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers auto
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python .ci/house.py
	$(BIN)/python -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

docs: .venv/.dev
# By way of another file: a failure would leave the document empty.
	$(BIN)/argosy config schema > .venv/run.schema.json
	mv .venv/run.schema.json docs/run.schema.json
	$(BIN)/python docs/site/build.py

test-docs: .venv/.dev
	$(BIN)/python -m pytest tests/test_docs.py tests/test_site.py -m ""

cards: .venv/.dev
	$(BIN)/python tests/family_cards.py 8 2

bench: .venv/.bench
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/prepare.py

gpu: .venv/.dev
	$(BIN)/python benchmarks/gpu_day.py

bench-planner: .venv/.dev
	$(BIN)/python benchmarks/planner/score.py
	$(BIN)/python benchmarks/planner/score.py --calibration-rows 5
	$(BIN)/python benchmarks/planner/score_serving.py
	$(BIN)/python benchmarks/planner/score_serving.py --calibration-rows 5

package: .venv/.dev
	$(BIN)/python .ci/package.py

pins: .venv/.dev
	$(BIN)/uv pip compile --quiet --extra dev --extra ray --no-annotate --custom-compile-command "make pins" $(UPGRADE) \
		--output-file constraints.txt pyproject.toml

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.core: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[watch]'
	@touch $@

.venv/.dev: .venv/.core
# What only tests and linters use is compiled where it is imported: to compile all of it took half of the installation.
	$(PIP) --no-compile --editable '.[dev]'
	@touch $@

.venv/.bench: .venv/.dev
	$(PIP) --editable '.[bench]'
# litgpt asks for an older huggingface-hub than transformers, and runs with the newer one.
	$(PIP) --no-deps litgpt==0.5.13
	@touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
