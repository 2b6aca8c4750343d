# setup: everything into .venv from pinned requirements · demo: train the tiny model · test, lint: as they say
# test-matrix: dapo-math under the Verifiers versions that `test` leaves out · bench: what benchmarks/ measures on a CPU
.PHONY: setup demo test test-matrix bench lint clean
PIP = .venv/bin/python -m pip --disable-pip-version-check
# Where PyTorch's CPU wheels are served, say so here to spare several GB of CUDA libraries: PIP_TORCH_ARGS="--index-url URL"
PIP_TORCH_ARGS ?=
# Any Python 3.11 or 3.12; the first that answers is taken.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)

setup: .venv/.ready
.venv/.ready: requirements/cpu.txt pyproject.toml environments/dapo_math/pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or 3.12 with venv found; install one, or name it: make PYTHON=..."; exit 1; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(PIP) install --quiet $(PIP_TORCH_ARGS) torch==2.13.0
	$(PIP) install --quiet --no-deps --requirement requirements/cpu.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable . --editable environments/dapo_math
	touch $@

demo: setup
	.venv/bin/python -m trainer.grpo --env dapo-math @ configs/tiny_cpu.toml

# Two workers, each with servers of its own: the tests wait for those half of the time.
test: setup
	.venv/bin/python -m pytest --numprocesses 2 --dist loadfile

test-matrix: setup
	.venv/bin/python -m pytest -m matrix

bench: setup
	.venv/bin/python benchmarks/grading.py
	.venv/bin/python benchmarks/bridge_overhead.py

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/basedpyright

clean:
	rm -rf .venv .cache outputs .pytest_cache .ruff_cache
