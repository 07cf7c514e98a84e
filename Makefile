# Two commands for a newcomer: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= out

.PHONY: demo test check bench clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,device]'
	touch $@

## demo: nine ways to cache gpt-oss-20b's experts, on real requests: a table, pictures and a timeline under out/demo
demo: $(VENV)/.installed
	$(BIN)/moesim replay experiments/demo/demo.toml --out $(OUT)/demo --timeline-of "EMA + prefetch, 8 slots"

## test: everything that CI runs; installs torch too, for the tests of the profiler
test: $(VENV)/.installed-dev
	$(MAKE) check

## check: format, lint, types, import order, tests; stops at the first failure
check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@# Kernels are compiled into a cache that both test workers then read; else each would compile all of them.
	$(BIN)/moesim replay experiments/demo/demo.toml --limit 1 --no-bound > /dev/null
	$(BIN)/python -m pytest -n 2 --dist loadscope

$(VENV)/.installed-bench: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

## bench: speed as ratios in one run (engine, libCacheSim, growth, devices, sizes, Parquet): tables and out/bench.json
bench: $(VENV)/.installed-bench
	$(BIN)/python -m bench --out $(OUT)/bench.json $(BENCH)

clean:
	rm -rf $(VENV) $(OUT)
