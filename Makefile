# make demo      the main job: CBN against BatchNormalization on real images
# make test      the tests, on TensorFlow and JAX, and the coverage of keras_norms
# make test-all  the same, and PyTorch, keras-hub's networks, the TPU compiler, all
#                recipes on JAX
# make install   .venv with TensorFlow, JAX, and what recipes, tuner and tests need

PYTHON ?= python3
# A process a core: more threads would wait for each other.
PYTEST ?= JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 TF_NUM_INTRAOP_THREADS=1 \
	.venv/bin/python -m pytest -q -n auto --dist worksteal
# On one backend, with what lines and branches of keras_norms ran.
pytest = KERAS_BACKEND=$(1) COVERAGE_FILE=.coverage.$(1) $(PYTEST) --cov --cov-report=
export TF_CPP_MIN_LOG_LEVEL ?= 2
# Written in terms of Keras only, and slow to compile: on JAX in test-all.
LATER_ON_JAX := tests/benchmarks tests/surgery tests/recipes/blindness \
	tests/recipes/cbn tests/recipes/models tests/recipes/smoothness \
	tests/recipes/spheres tests/recipes/test_commands.py \
	tests/recipes/test_compare.py \
	$(addprefix tests/tuner/test_, cluster.py files.py oracles.py search.py)

.PHONY: demo test test-all test-extra lint format install
.DELETE_ON_ERROR:

demo: install
	@echo "CBN against BatchNormalization: 30 small residual networks learn 1,437 images"
	@echo "of digits. About 2 minutes on two cores."
	@.venv/bin/python -m recipes.compare --models=resnet8 --rho=2

test: lint
	$(call pytest,tensorflow)
	$(call pytest,jax) $(LATER_ON_JAX:%=--ignore=%)
	.venv/bin/coverage combine -q --keep .coverage.tensorflow .coverage.jax
	.venv/bin/coverage report --fail-under=95

test-all: test test-extra

test-extra: .venv/installed-extra
	KERAS_BACKEND=torch $(PYTEST)
	KERAS_BACKEND=torch $(PYTEST) -m hub
	KERAS_BACKEND=tensorflow $(PYTEST) -m hub
	KERAS_BACKEND=jax $(PYTEST) -m hub
	KERAS_BACKEND=jax $(PYTEST) -m tpu
	KERAS_BACKEND=jax $(PYTEST) $(LATER_ON_JAX)

lint: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: install
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

install: .venv/installed

.venv/installed: setup.cfg constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q -c constraints.txt \
		-e '.[tensorflow,jax,recipes,tuner,dev]'
	touch $@

.venv/installed-extra: .venv/installed
	.venv/bin/pip install -q -c constraints.txt -e '.[torch,tpu,hub]'
	touch $@
