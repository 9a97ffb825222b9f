PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
NATIVE := $(wildcard zpp/kernels/*.cpp zpp/kernels/*.h cuda/*.cu cuda/*.cuh)
CHECKED := zpp collectives_bench tests setup.py

.PHONY: demo test lint clean

# Three ways to train a small GPT on two emulated nodes of two ranks, over a slow link where one can be had.
demo: $(INSTALLED)
	$(BIN)/python -m collectives_bench train --link 200mbit --systems fsdp2,zero3,zeropp --steps 20 --warmup 2

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy

# The native sources are among the prerequisites because an editable install builds them only once.
$(INSTALLED): setup.cfg setup.py pyproject.toml requirements.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info zpp/kernels/_host*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find zpp collectives_bench tests -name __pycache__ -type d -prune -exec rm -rf {} +
