# `make serve` and `make test` do everything on a machine with Python 3.11 or newer.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
BIN := .venv/bin

.PHONY: serve dev test test-ray bench bench-quick bench-limit soak clean

serve: .venv/serving
	$(BIN)/uvicorn server:app --host $(HOST) --port $(PORT)

dev: .venv/developing

test: .venv/developing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest --cov -n 2 --dist loadfile

# On a real Ray, which CI does without: 200 MB more.
test-ray: .venv/developing
	$(BIN)/pip install --quiet --disable-pip-version-check -r deploy/requirements-ray.txt
	$(BIN)/pytest tests/test_ray.py

# Against every peer (half an hour), against one (a minute), against the limit of the processor.
bench: .venv/developing .benchmarks/venv/ready
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.suite

bench-quick: .venv/developing
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.quick

bench-limit: .benchmarks/venv/ready
	HF_HUB_OFFLINE=1 .benchmarks/venv/bin/python -m benchmarks.limit

# What `make test` does a little of: 200,000 requests of all kinds while the model fails at random
# and is loaded anew, 20 stops under load, 10 reloads under load, 10,000 mixed requests, two minutes
# of invented ones (20 minutes).
soak: .venv/developing
	CHAOS_REQUESTS=200000 TERMINATIONS=20 RELOADS=10 MIXED_CALLS=10000 FUZZ_S=60 \
	$(BIN)/pytest -s tests/test_chaos.py tests/test_reloading.py tests/test_mixed.py tests/test_openapi.py

clean:
	rm -rf .venv .benchmarks .coverage .mypy_cache .pytest_cache .ruff_cache

.venv/serving: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.venv/developing: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

.benchmarks/venv/ready: requirements.txt benchmarks/requirements.txt
	$(PYTHON) -m venv .benchmarks/venv
	.benchmarks/venv/bin/pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	touch $@
