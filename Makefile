# make env        build the environment, .venv/python3, alone
# make pretrain   train a small language model by 1-bit Adam, Adam and local steps
# make test       what every change must pass (five minutes on two cores)
# make test-all   the long tests as well
# make test-aot   the GPU kernels and whole clusters' steps, compiled for H200s without
#                 one (a download of 700 MB)
# make docs       the site, in docs/_build: pages and the API reference
# make wheel      the sdist and the wheel, in dist, and the wheel tried with its
#                 dependencies alone
# make drills     workers killed, links cut, disks filled, in real processes
#
# PYTHON=python3.12 chooses another interpreter; ARGS="--resume" is passed on.

PYTHON ?= python3
ENV := .venv/$(notdir $(PYTHON))
BIN := $(ENV)/bin
CUDA := $(ENV)-cuda
BARE := $(ENV)-bare
ROOMS := onebit_jax pallas_kernels onebit_launch models train benchmarks tests

.PHONY: env pretrain test test-all test-aot docs wheel drills lint clean

# pip is run from outside the environment, so that Debian's separate python3-venv
# (which carries ensurepip) is not needed. pip inside is for what the user adds.
$(ENV)/.base: pyproject.toml
	$(PYTHON) -m venv --without-pip $(ENV)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet pip --editable '.[train]'
	@touch $@

$(ENV)/.test: $(ENV)/.base
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --editable '.[train,test]'
	@touch $@

env: $(ENV)/.base

pretrain: $(ENV)/.base
	$(BIN)/python -m train.lm --compare $(ARGS)

lint: $(ENV)/.test
	$(BIN)/ruff check $(ROOMS) docs/examples
	$(BIN)/ruff format --check $(ROOMS) docs/examples
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# Compiling takes longer than running here, so that little of it is optimised, and XLA's
# slow fusion emitters are left out where it still can; test-all runs what users run.
PLAIN := --xla_cpu_use_fusion_emitters=false
test: lint
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS=$$(XLA_FLAGS=$(PLAIN) $(BIN)/python -c \
	  "import jax; jax.devices()" 2> /dev/null && echo $(PLAIN)) \
	  $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	  -m 'not slow' --ignore tests/drills --ignore tests/wheel $(ARGS)

test-all: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --hypothesis-profile thorough \
	  --ignore tests/drills --ignore tests/wheel $(ARGS)

drills: $(ENV)/.test
	$(BIN)/python -m pytest tests/drills $(ARGS)

# The compiler for GPUs alone, beside the environment: with the plugin inside, every
# other test would look for a GPU.
$(CUDA)/.done: $(ENV)/.test
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --no-deps --upgrade \
	  --target $(CUDA) nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime \
	  $$($(BIN)/python -c "import jax; v = jax.__version__; \
	  print(f'jax-cuda13-plugin=={v} jax-cuda13-pjrt=={v}')")
	@touch $@

test-aot: $(CUDA)/.done
	PYTHONPATH=$(CUDA) JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \
	  XLA_FLAGS=--xla_gpu_autotune_level=0 MOSAIC_GPU_DUMP_PTX=1 \
	  MOSAIC_GPU_DUMP_PTXAS=1 $(BIN)/python -m pytest tests/aot -m 'not slow' $(ARGS)

$(ENV)/.docs: $(ENV)/.base
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --editable '.[train,docs]'
	@touch $@

docs: $(ENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going docs docs/_build $(ARGS)

# build makes the wheel from the sdist.
wheel: $(ENV)/.test
	rm -rf dist $(BARE)
	$(BIN)/python -m build
	$(PYTHON) -m venv --without-pip $(BARE)
	$(PYTHON) -m pip --python $(BARE)/bin/python install --quiet dist/*.whl
	$(BIN)/python -m pytest tests/wheel $(ARGS)

clean:
	rm -rf .venv runs dist docs/_build
