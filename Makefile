# The commands of a checkout. They need make and Python 3.11 or newer; everything else goes into $(VENV).
#
#   PYTHON=python3.12     the interpreter of a new environment (default: the first that will do)
#   TORCH_INDEX_URL=...   one more package index to take torch from (see CONTRIBUTING.md)
#   ARGS="..."            for `make demo`: what follows `meshwright train`; for `make matrix`: --cold, --only TEXT
#   PYTEST_ARGS="..."     for `make test`: what follows `pytest`

VENV ?= .venv
ARGS ?=
PYTEST_ARGS ?=

BIN = $(VENV)/bin
SETUP = sh scripts/setup.sh "$(VENV)"

.PHONY: help demo test test-slurm matrix composition setup clean

help:
	@echo "make demo    set up the core and train a small model over four processes"
	@echo "make test    set up for development, then lint, import contract, types, wheel and tests"
	@echo "make test-slurm  the same for runs under a real Slurm, on this machine (Linux, root)"
	@echo "make matrix  judge every layout against one process and write docs/matrix.md"
	@echo "make composition   compute what goes with what and write docs/composition.md"
	@echo "make setup   set up with every extra"
	@echo "make clean   remove the environment, builds and caches (never runs/)"

demo:
	@$(SETUP)
	"$(BIN)/meshwright" train $(ARGS)

# The quick checks come first; pytest comes last, so that its closing lines close the output.
test:
	@$(SETUP) dev,float8,hf,slurm,track
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/lint-imports"
	"$(BIN)/pyright" --pythonpath "$(BIN)/python"
	"$(BIN)/python" scripts/check_wheel.py
	OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest $$(nvidia-smi -L >/dev/null 2>&1 || echo --ignore=tests/gpu) --ignore=tests/slurm $(PYTEST_ARGS)

# Slurm itself comes from the system: 'python scripts/slurm_cluster.py install' gets Debian's packages.
test-slurm:
	@$(SETUP) dev,float8,hf,slurm,track
	@"$(BIN)/python" scripts/slurm_cluster.py check
	OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest tests/slurm $(PYTEST_ARGS)

# What was judged before is remembered in .cache/matrix, as long as nothing changes that it depends on.
matrix:
	@$(SETUP) dev,float8,hf,slurm,track
	OMP_NUM_THREADS=1 "$(BIN)/python" scripts/matrix.py $(ARGS)

composition:
	@$(SETUP) dev,float8,hf,slurm,track
	OMP_NUM_THREADS=1 "$(BIN)/python" scripts/composition.py

setup:
	@$(SETUP) all

clean:
	@if [ -f "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi
	rm -rf build dist .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
