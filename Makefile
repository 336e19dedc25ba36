# make pretrain   train a small BERT with 1-bit Adam beside plain Adam
# make test       what every change must pass (under ten minutes on two cores)
# make test-all   the long tests as well
#
# PYTHON=python3.12 chooses another interpreter; ARGS="--resume" is passed on.

PYTHON ?= python3
ENV := .venv/$(notdir $(PYTHON))
BIN := $(ENV)/bin
ROOMS := onebit_jax pallas_kernels models train benchmarks tests

.PHONY: pretrain test test-all lint clean

# pip is run from outside the environment, so that Debian's separate python3-venv
# (which carries ensurepip) is not needed.
$(ENV)/.base: pyproject.toml
	$(PYTHON) -m venv --without-pip $(ENV)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --editable '.[train]'
	@touch $@

$(ENV)/.test: $(ENV)/.base
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --editable '.[train,test]'
	@touch $@

pretrain: $(ENV)/.base
	$(BIN)/python -m train.pretrain --compare --out runs/pretrain $(ARGS)

lint: $(ENV)/.test
	$(BIN)/ruff check $(ROOMS)
	$(BIN)/ruff format --check $(ROOMS)
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow' $(ARGS)

test-all: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --hypothesis-profile thorough $(ARGS)

clean:
	rm -rf .venv runs
