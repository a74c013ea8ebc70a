# make demo      the main job: CBN against BatchNormalization on real images
# make quick     the tests that find most mistakes, on TensorFlow
# make test      the tests, on TensorFlow and JAX, and the coverage of keras_norms
# make test-all  everything there is: PyTorch, the compilers, kills, every combination
# make test-oldest  the tests on the oldest Keras and backends that work (BACKENDS=jax)
# make test-latest  the same on the newest there are
# make test-dist    wheel and sdist, each tried with nothing but one backend
# make dist      wheel and sdist, in dist/
# make docs      the site, in build/site
# make numbers   the tables of README and docs, from the numbers beside them
# make install   .venv with TensorFlow, JAX, and what recipes, tuner and tests need

PYTHON ?= python3
BACKENDS ?= tensorflow jax torch
# A process a core: more threads would wait for each other. What JAX has compiled, for
# this code and this processor, is kept for the next time.
PYTEST ?= JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 TF_NUM_INTRAOP_THREADS=1 \
	JAX_COMPILATION_CACHE_DIR=$(CURDIR)/build/jax \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	.venv/bin/python -m pytest -q -n auto --dist worksteal
export TF_CPP_MIN_LOG_LEVEL ?= 2
# On one backend: its tests, and which lines and branches of keras_norms they ran.
pytest = KERAS_BACKEND=$(1) COVERAGE_FILE=.coverage.$(1) $(PYTEST) --cov --cov-report=
# What a part of the tests took, on its last line.
timed = @start=$$(date +%s); $(2) && echo "$(1): $$(($$(date +%s) - start)) s"
TORCH := KERAS_BACKEND=torch $(PYTEST) -m "thorough or not thorough"
THOROUGH := $(PYTEST) -m thorough
# Without its fusion emitters XLA compiles for CPUs in half the time. `make test` has them.
FAST_XLA := XLA_FLAGS=--xla_cpu_use_fusion_emitters=false
# All layers against their references, one training, one conversion, the README.
QUICK := tests/layers/test_every_layer.py tests/recipes/test_train.py \
	tests/surgery/test_inline.py::test_convert_save_recalibrate_prune_and_fold \
	tests/test_readme.py

.PHONY: demo quick test test-all test-oldest test-thorough docs numbers lint format
.PHONY: install test-latest test-dist dist
.DELETE_ON_ERROR:

demo: install
	@echo "CBN against BatchNormalization: 30 small residual networks learn 1,437 images"
	@echo "of digits. 2 to 4 minutes on two cores."
	@.venv/bin/python -m recipes.compare --models=resnet8 --rho=2

quick: lint
	$(call timed,quick,KERAS_BACKEND=tensorflow $(PYTEST) $(QUICK))

test: lint
	$(call timed,TensorFlow,$(call pytest,tensorflow))
	$(call timed,JAX,$(call pytest,jax))
	.venv/bin/coverage combine -q --keep .coverage.tensorflow .coverage.jax
	.venv/bin/coverage report --fail-under=95

test-all: test test-thorough

test-thorough: .venv/installed-extra docs
	$(call timed,PyTorch,$(TORCH))
	$(call timed,TensorFlow thorough,KERAS_BACKEND=tensorflow $(THOROUGH))
	$(call timed,JAX thorough,KERAS_BACKEND=jax $(FAST_XLA) $(THOROUGH))

# A warning is an error, and so is a link within the site that leads nowhere; with -q
# they would pass.
docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict
	@echo "build/site/index.html; with its search:"
	@echo ".venv/bin/python -m http.server -d build/site"

numbers: .venv/installed-extra
	.venv/bin/python docs/tables.py

# Files of a later Keras do not load in an earlier one.
test-oldest: IGNORED := --ignore=tests/test_golden.py
test-oldest test-latest: test-%: .venv-%/installed
	for backend in $(BACKENDS); do \
		KERAS_BACKEND=$$backend $(subst .venv,.venv-$*,$(PYTEST)) $(IGNORED) \
			|| exit; done

# In an empty environment and another folder, so that the checkout is not seen.
test-dist: dist
	@for backend in $(BACKENDS); do \
		for file in $(CURDIR)/dist/*.whl $(CURDIR)/dist/*.tar.gz; do \
			rm -rf build/dist && mkdir -p build && $(PYTHON) -m venv build/dist && \
			build/dist/bin/pip install -q -c constraints.txt "$$file[$$backend]" && \
			(cd build/dist && KERAS_BACKEND=$$backend bin/python \
				$(CURDIR)/tests/programs/installed.py) || exit; \
		done; \
	done
	rm -rf build/dist

dist: install
	rm -rf dist
	.venv/bin/python -m build -o dist .

lint: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports --no-logo --no-cache
	.venv/bin/mypy

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
	.venv/bin/pip install -q -c constraints.txt -e '.[torch,tpu,gpu-compiler,hub,deploy]'
	touch $@

.venv/installed-docs: .venv/installed
	.venv/bin/pip install -q -c constraints.txt -e '.[docs]'
	touch $@

.venv-%/installed: setup.cfg $(wildcard constraints-*.txt)
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install -q $(addprefix -c ,$(wildcard constraints-$*.txt)) \
		-e '.[tensorflow,jax,torch,recipes,tuner,dev]'
	touch $@
