# The two commands most people need: `make demo` and `make test`. Each does its own set-up.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench chaos lock clean distclean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup:  ## what the other targets need: .venv, packages, CRIU
	@scripts/setup.sh

demo: setup  ## a guided tour on a cluster of three nodes on this machine
	@.venv/bin/grid demo

test: lint  ## set-up, lint, then the whole suite
	@.venv/bin/python scripts/test_lanes.py

lint: setup  ## ruff, mypy (strict), import-linter
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports

bench: setup  ## every figure of docs/figures.md beside its peer (BENCH="name name" picks some)
	@scripts/setup.sh --bench
	@.venv/bin/python -m bench $(BENCH)

chaos: setup  ## long fault and soak runs
	@.venv/bin/python -m pytest -m chaos tests

lock: setup  ## requirements.lock again, after a change in pyproject.toml
	@scripts/setup.sh --lock

clean:  ## caches and build products
	@rm -rf dist build bench/results .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find src tests bench scripts examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean  ## also .venv and everything setup fetched
	@rm -rf .venv .cache
