# `make demo` and `make test` work in a fresh clone: each first makes the environment .venv.

# The torch build that is installed: a requirement, with any options that pip takes.
#     make test TORCH="torch==2.14.1"
TORCH ?= torch==2.13.0
# The Python, 3.11 or newer, that makes the environment.
PYTHON ?= python3
# More arguments for the demo and for pytest.
ARGS ?=

BIN := .venv/bin
# Two tests at a time.
PYTEST := -m pytest -n 2 --dist loadgroup
comma := ,
CHECK_PYTHON := import sys; \
	sys.exit(None if sys.version_info >= (3, 11) else \
	"dtorch needs Python 3.11 or newer, not " + sys.version.split()[0] + ": set PYTHON=")
WRITE_PIN := import importlib.metadata as m, sys; \
	open(sys.argv[1], "w").write("torch==" + m.version("torch"))

# $(call install,VENV,TORCH,EXTRAS): torch first, then dtorch with that very torch pinned, so that
# no package's own requirement replaces the build that was asked for.
define install
@$(PYTHON) -c '$(CHECK_PYTHON)'
@test -x $(1)/bin/pip || $(PYTHON) -m venv $(1)
@echo 'Installing $(2) into $(1) ...'
@$(1)/bin/pip install -qq $(foreach word,$(2),'$(word)')
@$(1)/bin/python -c '$(WRITE_PIN)' $(1)/torch.txt
@echo 'Installing dtorch[$(3)] into $(1) ...'
@$(1)/bin/pip install -qq --constraint $(1)/torch.txt --editable '.[$(3)]'
endef

.PHONY: .venv native demo test lint quick test-torch clean FORCE

.venv: .venv/.installed

.venv/.installed: pyproject.toml .venv/.torch
	$(call install,.venv,$(TORCH),serve$(comma)test)
	@touch $@

# Changes, and so reinstalls, only when the value of TORCH does.
.venv/.torch: FORCE
	@mkdir -p .venv
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

# The C++ executor, built once into the user's cache. Where it cannot be, one line says why, and
# everything runs on the Python executor.
native: .venv
	-@$(BIN)/python -m dtorch.build

demo: native
	@$(BIN)/python examples/llama.py $(ARGS)

# Everything on the native executor, with a fifth of the layouts that pytest alone samples; then on
# the Python one what may depend on it, with a tenth of them.
test: lint native
	DTORCH_SWEEP=0.2 $(BIN)/python $(PYTEST) $(ARGS)
	DTORCH_EXECUTOR=python DTORCH_SWEEP=0.1 $(BIN)/python $(PYTEST) -m 'not once' $(ARGS)

lint: .venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

# What pre-commit runs after lint: seconds.
quick: .venv
	$(BIN)/python -m pytest tests/test_layering.py tests/test_quickstart.py

# The core tests under another torch, on both executors, in an environment of its own without the
# models' packages: the tests that need those skip themselves.
test-torch:
	@test -n '$(VERSION)' || { echo 'usage: make test-torch VERSION=2.11.0' >&2; exit 2; }
	$(call install,.venv-torch-$(VERSION),torch==$(VERSION),test)
	-@.venv-torch-$(VERSION)/bin/python -m dtorch.build
	DTORCH_SWEEP=0.1 .venv-torch-$(VERSION)/bin/python $(PYTEST) $(ARGS)
	DTORCH_EXECUTOR=python DTORCH_SWEEP=0.1 .venv-torch-$(VERSION)/bin/python $(PYTEST) \
		-m 'not once' $(ARGS)

clean:
	rm -rf .venv .venv-torch-* build dist *.egg-info .pytest_cache .ruff_cache
	find dtorch tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
