# Every target brings what it needs into .venv and .cache first; see tools/bootstrap.
BIN := .venv/bin
UV := .cache/uv/bin/uv
CODE := dagster_rebalance example_project examples proofs tests tools
ARGS :=
SEED := 1
# Each Dagster run is a process that imports Dagster. That is compiled once, also where the machine says to write no bytecode.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/.cache/bytecode

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install demo bench chaos compat spark-matrix sim mutants docs test check format format-check lint types imports core-coverage lock clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

install:  ## bring the locked environment and Java; nothing to do the second time
	@tools/bootstrap

demo: install  ## streaming runs through a deploy and a kill -9, in two minutes (ARGS="--per-batch": a run for each batch)
	$(BIN)/python -m proofs demo $(ARGS)

bench: install  ## measure beside confluent-kafka and aiokafka, into build/bench.json (ARGS="--only tracker" for some)
	$(BIN)/python -m proofs bench $(ARGS)

SCHEDULES := 1000
# Without SEED on the command line, schedules that nobody has played.
sim: install  ## many lives of a group in virtual time, into build/sim.json (SCHEDULES=10000 SEED=7; one of them again: python -m proofs life)
	$(BIN)/python -m proofs simulate --schedules $(SCHEDULES) $(if $(filter command environment,$(firstword $(origin SEED))),--seed $(SEED)) $(ARGS)

FAULTS := 20
chaos: install  ## faults on real brokers, members and runs, into build/chaos.json (FAULTS=200 SEED=7 ARGS="--streaming --storage postgres")
	$(BIN)/python -m proofs chaos --faults $(FAULTS) --seed $(SEED) $(ARGS)

compat: install  ## hold revokes with the oldest, locked and newest Kafka client on Kafka 4.1 and 3.9, into build/compat.json
	$(BIN)/python tools/compat.py $(ARGS)

spark-matrix: install  ## the tests of Spark with the newest release of each minor, into build/spark-matrix.json
	$(BIN)/python -m tools.spark_matrix $(ARGS)

MUTANTS := 100
mutants: install  ## slips of the hand that tests without a broker must notice (MUTANTS=30 SEED=7); a run takes long
	$(BIN)/python -m tools.mutants --mutants $(MUTANTS) --seed $(SEED) $(ARGS)

# Each JVM of Spark starts at half the cost.
.cache/spark-classes.jsa: requirements/dev.txt | install
	$(BIN)/python -m tests.spark.class_archive $@

# Three at a time keep two cores busy: half of a test with real parts is waiting. A file stays together, and files that
# share servers do, so each server is started once.
test: install .cache/spark-classes.jsa  ## all tests, real broker, Spark and Dagster included (ARGS="tests/core -x" for some)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

# MkDocs tells news of its own on each build; a warning of ours is an error.
docs: install  ## the documentation site, into build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs --quiet build --strict

# Tests with real parts wait half of their time. What needs none runs beside them, and speaks up only when it fails.
check: install format-check lint imports  ## all that CI asks for
	@mkdir -p build
	@nice $(MAKE) --no-print-directory types docs core-coverage > build/beside.log 2>&1 & beside=$$!; \
	$(MAKE) --no-print-directory test ARGS=--ignore=tests/core; tests=$$?; \
	wait $$beside || { cat build/beside.log; exit 1; }; exit $$tests

format: install  ## format the code and fix what can be fixed
	$(BIN)/ruff check --fix-only $(CODE)
	$(BIN)/ruff format $(CODE)

format-check: install
	$(BIN)/ruff format --check $(CODE)

lint: install  ## ruff, and the prose (tools/prose.py)
	$(BIN)/ruff check $(CODE)
	$(BIN)/python -m tools.prose

types: install  ## mypy, strict
	$(BIN)/mypy

imports: install  ## layers and third-party packages (import-linter)
	$(BIN)/lint-imports

core-coverage: install  ## the core's own tests must reach every branch of it
	$(BIN)/python -m pytest -q -n 2 tests/core --cov=dagster_rebalance.core --cov-branch --cov-fail-under=100 --cov-report=term-missing:skip-covered

lock: install  ## resolve again, keeping pins that still fit (ARGS=--upgrade for the newest)
	$(UV) pip compile pyproject.toml --output-file requirements/dev.txt --custom-compile-command "make lock" $(ARGS) \
		--universal --python-version 3.10 --all-extras --group dev --generate-hashes --no-emit-index-url --no-emit-find-links --quiet
	tools/bootstrap

clean:  ## remove what was built and cached in this checkout
	rm -rf .venv .cache build dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
