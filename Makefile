# The commands of a checkout. They need make and Python 3.11 or newer; everything else goes into $(VENV).
#
#   PYTHON=python3.12     the interpreter of a new environment (default: the first that will do)
#   TORCH_INDEX_URL=...   one more package index to take torch from (see CONTRIBUTING.md)
#   ARGS="..."            for `make demo`: what follows `meshwright train`; for `make matrix`: --cold, --only TEXT; for `make gpu`:
#                         --dry, --only, --again, --minutes; for the tests: pytest's
#   PIECE=2/3             for `make test-all`: one piece of it
#   VERSION=2.14.1        for `make test-versions`: one release of torch, or several

VENV ?= .venv
ARGS ?=
PIECE ?=
VERSION ?=

BIN = $(VENV)/bin
SETUP = sh scripts/setup.sh "$(VENV)"
TESTED = dev,adapters,eval,fabric,float8,hf,slurm,track,trl,vision

.PHONY: help demo test test-all test-versions test-slurm gpu gpu-cluster docs matrix composition wheel setup clean

help:
	@echo "make demo    set up the core and train a small model over four processes"
	@echo "make test    set up for development, then tests, with lint, import contract, types and wheel beside them"
	@echo "make test-all    every case of every test, in pieces (tests/README.md)"
	@echo "make test-versions   what another release can break, on the oldest and the newest torch (docs/tested.md)"
	@echo "make test-slurm  the same for runs under a real Slurm, on this machine (Linux, root)"
	@echo "make gpu     first contact with an NVIDIA GPU: parity, kernels, speed, memory (docs/gpu.md); a second call resumes"
	@echo "make gpu-cluster   every axis over the GPUs of this machine"
	@echo "make docs    build the documents into build/site; a broken link is an error"
	@echo "make matrix  judge every layout against one process and write docs/data/matrix.txt"
	@echo "make composition   compute what goes with what and write docs/data/composition.txt"
	@echo "make wheel   build dist/*.tar.gz and dist/*.whl, checked and tried in an environment of their own"
	@echo "make setup   set up with every extra"
	@echo "make clean   remove the environment, builds and caches (never runs/)"

demo:
	@$(SETUP)
	"$(BIN)/meshwright" train $(if $(ARGS),$(ARGS),--process.count=4)

# With ARGS tests alone, and those of them that ARGS choose.
test:
	@$(SETUP) $(TESTED)
	@"$(BIN)/python" scripts/run_tests.py $(ARGS)

test-all:
	@$(SETUP) $(TESTED)
	@"$(BIN)/python" scripts/run_tests.py --all $(if $(PIECE),--piece $(PIECE)) $(ARGS)

# Environments of their own, kept between runs: some 6 GB for each release of torch.
test-versions:
	@$(SETUP) $(TESTED)
	@"$(BIN)/python" scripts/releases.py $(VERSION) $(ARGS)

# Slurm itself comes from the system: 'python scripts/slurm_cluster.py install' gets Debian's packages.
test-slurm:
	@$(SETUP) $(TESTED)
	@"$(BIN)/python" scripts/slurm_cluster.py check
	OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest tests/slurm $(ARGS)

# No environment is made and no network asked: the Python that has torch runs the sources. PYTHON names another one.
GPU_PYTHON = $(if $(PYTHON),$(PYTHON),$(if $(wildcard $(BIN)/python),$(BIN)/python,python3))

gpu:
	@PYTHONPATH=src "$(GPU_PYTHON)" -m benchmarks.first_contact $(ARGS)

# Over several nodes: srun python -m benchmarks.first_contact.cluster, or torchrun (docs/gpu.md).
gpu-cluster:
	@PYTHONPATH=src "$(GPU_PYTHON)" -m benchmarks.first_contact.cluster $(ARGS)

docs:
	@$(SETUP) docs
	NO_MKDOCS_2_WARNING=1 "$(BIN)/python" -m mkdocs build --quiet
	@echo "build/site/index.html"

# What was judged before is remembered in .cache/matrix, as long as nothing changes that it depends on.
matrix:
	@$(SETUP) $(TESTED)
	OMP_NUM_THREADS=1 "$(BIN)/python" -m benchmarks.survey matrix $(ARGS)

composition:
	@$(SETUP) $(TESTED)
	OMP_NUM_THREADS=1 "$(BIN)/python" -m benchmarks.survey composition

wheel:
	@$(SETUP) dev
	@"$(BIN)/python" scripts/check_wheel.py dist

setup:
	@$(SETUP) all

clean:
	@if [ -f "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi
	rm -rf build dist .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
