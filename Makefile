# `make serve` and `make test` do everything on a machine with Python 3.11 or newer.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
BIN := .venv/bin

.PHONY: serve test clean

serve: .venv/serving
	$(BIN)/uvicorn server:app --host $(HOST) --port $(PORT)

test: .venv/developing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest --cov

clean:
	rm -rf .venv .coverage .mypy_cache .pytest_cache .ruff_cache

.venv/serving: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.venv/developing: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@
