# The same commands by hand and in CI. PYTHON is the interpreter of an environment with the `test` extra.
PYTHON ?= .venv/bin/python
TREE := build/tree
SEEDS ?= 50
MINUTES ?= 15
SEED ?= 1

.PHONY: check lint tree types test coverage demo bench gpu docs clean chaos sim canary

check: lint types

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

# Folders stand at the top but are imported under headrace: mypy and coverage see them through a tree of links.
tree:
	rm -rf $(TREE) && mkdir -p $(TREE)/headrace
	ln -s $(CURDIR)/headrace/* $(TREE)/headrace/
	for package in broker workers clients configs; do ln -s $(CURDIR)/$$package $(TREE)/headrace/$$package; done

types: tree
	cd $(TREE) && MYPYPATH=. $(abspath $(PYTHON)) -m mypy --config-file $(CURDIR)/pyproject.toml --strict -p headrace

test:
	$(PYTHON) -P -m pytest

# Faults at random on real processes. The last line is one JSON object; exit code 1 when anything is wrong.
chaos:
	PYTHONPATH=tests/e2e:tests/lib $(PYTHON) -P -m chaos --minutes $(MINUTES) --seed $(SEED)

# make sim SEED=123 | SEEDS=500 | MINUTES=60. What is asked for on the command line wins over the defaults.
sim:
	PYTHONPATH=tests/simulation $(PYTHON) -P -m hr_sim sim $(if $(filter command line environment,$(origin SEED)),--seed $(SEED),\
	  $(if $(filter command line environment,$(origin MINUTES)),--minutes $(MINUTES),--seeds $(SEEDS)))

# Bugs are planted in the sources as they stand: no method of a compiled class can be replaced.
canary: tree
	PYTHONPATH=$(CURDIR)/$(TREE):tests/simulation $(PYTHON) -P -m hr_sim canary

demo:
	$(PYTHON) -P -m headrace demo

bench:
	$(PYTHON) -m benchmarks scale

# On a machine with a GPU: the acceptance tests, then the table. Elsewhere the tests skip, with their reason.
gpu:
	$(PYTHON) -P -m pytest -q -rs tests/gpu
	mkdir -p build && $(PYTHON) -m benchmarks gpu --json build/gpu.json

docs:
	$(PYTHON) -P -m headrace.config_docs docs/configuration.md

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache

# 100 % of the branches of what must be provable: the protocol and the pure core. The sources as they stand are run,
# whatever is installed: of compiled modules coverage sees nothing.
coverage: tree
	PYTHONPATH=$(CURDIR)/$(TREE) $(PYTHON) -P -m pytest -q tests/unit/protocol tests/unit/broker --cov=headrace.protocol --cov=headrace.broker --cov-report=
	PYTHONPATH=$(CURDIR)/$(TREE) $(PYTHON) -P -m pytest -q tests/simulation/test_simulation.py -k planted
	$(PYTHON) -m coverage report --fail-under=100 --show-missing --skip-covered
