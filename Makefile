# The two commands of a fresh machine. PYTHON may name any interpreter from 3.11 to 3.13.
PYTHON ?= python3
AOT_PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
PYTEST = JAX_PLATFORMS=cpu $(BIN)/python -m pytest
# One more than cores, since some tests wait for others' processes; a worker takes up to 5 GB.
WORKERS := $(shell $(PYTHON) -c 'from os import *; \
  gib = sysconf("SC_PAGE_SIZE") * sysconf("SC_PHYS_PAGES") >> 30; \
  print(max(1, min(cpu_count() + 1, 4, gib // 5)))')
PARALLEL := --numprocesses=$(WORKERS) --dist=worksteal
PYTEST_FLAGS :=

.PHONY: demo wheel try-wheel test test-more test-ci test-fast check docs slow support aot aot-quick eval-draft clean

demo: $(VENV)/.installed
	$(BIN)/ssd-jax demo

# dist/ssd_jax-VERSION-py3-none-any.whl, for machines without a checkout. What setuptools left of earlier builds would
# go into it, too.
wheel: $(VENV)/.installed
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

# Installs it in a fresh environment of each Python, and decodes there with neither a checkout nor a compiler; in SSD
# only in the first.
PYTHONS := $(PYTHON)
try-wheel: wheel
	modes="sd ssd"; \
	for python in $(PYTHONS); do \
	  tests/try_wheel.sh "$$python" dist/*.whl $$modes || exit; \
	  modes=sd; \
	done

test: $(VENV)/.test
	$(PYTEST) $(PARALLEL) $(PYTEST_FLAGS)

# What CI runs a tenth of beside them: other whole engines and processes, wider matrices.
test-more: $(VENV)/.test
	$(PYTEST) $(PARALLEL) -m 'more and not slow' $(PYTEST_FLAGS)

# Both in one run, which collects the tests, and makes what those of a file share, once; MORE=1/10 has the first of
# ten parts of what `make test-more` runs.
test-ci: $(VENV)/.test
	$(PYTEST) $(PARALLEL) -m 'not slow and not oracle and not gpu and not tpu and not aot' $(if $(MORE),--more=$(MORE)) \
	  $(PYTEST_FLAGS)

# Files that compile nothing and start nothing, by what they import: about a minute of two cores.
test-fast: $(VENV)/.test
	$(PYTEST) $(PARALLEL) --fast $(PYTEST_FLAGS)

# PART=3/8 has the third of eight parts alone.
slow: $(VENV)/.test
	$(PYTEST) -m 'slow and not aot' $(if $(PART),--part=$(PART)) $(PYTEST_FLAGS)

# Figures of the drafts that come with the package, as their model cards have them.
eval-draft: $(VENV)/.installed
	for draft in ssd_jax/drafts/smollm2-*/; do \
	  test -d "$$draft" || { echo "no draft comes with this version" >&2; exit 2; }; \
	  $(BIN)/ssd-jax distill --config=configs/distill/evaluate-drafts.toml --draft="$$draft" || exit; \
	done

# Tries every kernel and program on whatever this machine has, and notes it in docs/support.md.
support: $(VENV)/.test
	$(BIN)/python -m tests.support

# Compiles every program for chips that are not there; needs JAX 0.12, so Python 3.12 or newer.
aot: $(VENV)-aot/.cuda
	JAX_PLATFORMS=cpu $(VENV)-aot/bin/python -m pytest -m aot $(PYTEST_FLAGS)

# A few of them, in some three minutes.
aot-quick: $(VENV)-aot/.test
	JAX_PLATFORMS=cpu $(VENV)-aot/bin/python -m pytest $(PARALLEL) -m 'aot and not slow' $(PYTEST_FLAGS)

$(VENV)-aot/.test: pyproject.toml
	$(AOT_PYTHON) -m venv $(VENV)-aot
	$(VENV)-aot/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,tpu]'
	touch $@

$(VENV)-aot/.cuda: $(VENV)-aot/.test
	$(VENV)-aot/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[cuda-aot]'
	touch $@

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/shellcheck --external-sources launch/*.sh launch/*/*.sh tests/*.sh

# The site of docs/ in build/site; links that lead nowhere fail.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "Python 3.11 to 3.13 is needed, this is %d.%d; name another: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[plot]'
	touch $@

$(VENV)/.test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-aot dist
