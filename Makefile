# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON_IN = .venv/bin/python
OLD_SGLANG = 0.5.16

.PHONY: help demo test test-matrix lint type format bench bench-cost venv develop clean

help:
	@echo "make demo [JSON=file]  a real SGLang server with simulated ranks, without and with the sidecar"
	@echo "make test              every test, on SGLang 0.5.23 and $(OLD_SGLANG)"
	@echo "make test-matrix       contract tests and a live server on every SGLang from 0.5.12 on (an hour)"
	@echo "make bench             A/B of policies on a model of 8 x H100: report in bench/out/"
	@echo "  FULL=1               every arm and setting; goes on where it was stopped"
	@echo "  TARGET=http://H:P    on a live server with the hook   MODEL=path  starts that server"
	@echo "make bench-cost        cost of a decision, the hook, the round trip, an outage; memory"
	@echo "make lint type format  ruff, mypy --strict, ruff format"
	@echo "make venv              .venv with the wheel, made again if a source has changed"
	@echo "make develop           the package editable in .venv instead, until make clean"

venv:
	@.ci/venv

develop:
	@DEV=1 .ci/venv

demo: venv
	$(PYTHON_IN) -m bench.demo $(if $(JSON),--json $(JSON))

test: venv
	@.ci/debian
	@.ci/venv sglang $(OLD_SGLANG)
	PYTHONPATH=.sglang/$(OLD_SGLANG) $(PYTHON_IN) -m pytest -q tests/contract tests/integration
	$(PYTHON_IN) -m pytest -q

test-matrix: venv
	$(PYTHON_IN) -m tests.matrix $(SGLANG)

lint: venv
	$(PYTHON_IN) -m ruff check .
	$(PYTHON_IN) -m ruff format --check .

type: venv
	$(PYTHON_IN) -m mypy

format: venv
	$(PYTHON_IN) -m ruff format .

bench: venv
	$(PYTHON_IN) -m bench.ab $(if $(FULL),--full) $(if $(TARGET),--target "$(TARGET)") \
	  $(if $(MODEL),--model "$(MODEL)") $(if $(TRACES),--traces "$(TRACES)") \
	  $(if $(SEEDS),--seeds $(SEEDS)) $(BENCH)

bench-cost: venv
	$(PYTHON_IN) -m bench.decide
	$(PYTHON_IN) -W ignore -m bench.hook
	$(PYTHON_IN) -m bench.roundtrip
	$(PYTHON_IN) -m bench.scrape
	$(PYTHON_IN) -m bench.footprint
	$(PYTHON_IN) -m bench.outage
	$(PYTHON_IN) -m bench.recovery
	$(PYTHON_IN) -m bench.restart
	$(PYTHON_IN) -m bench.degraded

clean:
	rm -rf .venv .sglang .pytest_cache .hypothesis .mypy_cache .ruff_cache bench/out
