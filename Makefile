# jaxstate: `make demo` generates text with the shipped model, `make test` checks everything.
# Both find a Python, make .venv and install into it; that happens once, and again when pyproject.toml changes.
#
#   make PYTHON=/path/to/python3.12   use this interpreter
#   make EXTRAS=cuda12                also install an extra, for a machine with an NVIDIA GPU (or cuda13)
#   make test PYTEST='-k text -x'     hand options to pytest, in place of two processes for the whole suite

SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu lint clean

PYTHON ?=
EXTRAS ?=
PYTEST ?=

python := .venv/bin/python
comma := ,
empty :=
space := $(empty) $(empty)
extras := $(subst $(comma),$(space),$(EXTRAS))
# The stamp's name holds what is installed, so that asking for more installs more.
run_extras := $(subst $(space),$(comma),$(sort $(extras)))
test_extras := $(subst $(space),$(comma),$(sort test $(extras)))
run_stamp := .venv/.ready-$(run_extras)
test_stamp := .venv/.ready-$(test_extras)

help:
	@echo 'make demo    generate text with the model that comes with jaxstate'
	@echo 'make test    lint, types and the whole test-suite'
	@echo 'make test-gpu  what only an NVIDIA GPU can show; skipped where there is none (EXTRAS=cuda13)'
	@echo 'make lint    ruff and pyright only'
	@echo 'make clean   remove .venv and everything built'

demo: $(run_stamp)
	@echo 'python -m jaxstate.serve demo -i examples/prompts.jsonl'
	@set -o pipefail; $(python) -m jaxstate.serve demo -i examples/prompts.jsonl --progress plain \
	  | $(python) examples/show.py examples/prompts.jsonl

test: lint
	$(python) -m pytest $(if $(PYTEST),$(PYTEST),-n 2 --dist loadfile)

# Several processes share the GPU, so none may take all of its memory.
test-gpu: $(test_stamp)
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(python) -m pytest tests/gpu $(if $(PYTEST),$(PYTEST),-n 4)

lint: $(test_stamp)
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m pyright --pythonpath $(python)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# One stamp per set of extras, written last: an interrupted set-up has none and is taken up again.
.venv/.ready-%: pyproject.toml
	@$(call set_up,[$*])
.venv/.ready-: pyproject.toml
	@$(call set_up,)

define set_up
set -eu; \
suits() { "$$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }; \
if ! { suits .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; }; then \
  found=; \
  for python in $(if $(PYTHON),'$(PYTHON)',python3.12 python3.13 python3.14 python3 python \
      "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python \
      "$${XDG_DATA_HOME:-$$HOME/.local/share}"/uv/python/cpython-3.1[2-9]*/bin/python3); do \
    if suits "$$python"; then found=$$python; break; fi; \
  done; \
  if [ -z "$$found" ]; then \
    if [ -n '$(PYTHON)' ]; then echo 'PYTHON=$(PYTHON) is not a Python >= 3.12 with the venv module.' >&2; exit 2; fi; \
    echo 'jaxstate needs Python 3.12 or newer (with the venv module), and none was found on PATH,' >&2; \
    echo 'in pyenv or in uv. Get one with any of these, then run make again:' >&2; \
    echo '  uv python install 3.12' >&2; \
    echo '  pyenv install 3.12' >&2; \
    echo '  apt install python3.12 python3.12-venv     (Debian, Ubuntu)' >&2; \
    echo '  brew install python@3.12                   (macOS)' >&2; \
    echo 'or name one: make PYTHON=/path/to/python3.12' >&2; \
    exit 2; \
  fi; \
  echo "set-up: making .venv with $$("$$found" --version) ($$found)"; \
  rm -rf .venv; \
  "$$found" -m venv .venv; \
fi; \
echo 'set-up: installing jaxstate$(1) into .venv (once; a few minutes at most)'; \
.venv/bin/python -m pip install -qq --disable-pip-version-check --editable '.$(1)'; \
touch '$@' .venv/.ready-$(run_extras)
endef
