# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON_IN = .venv/bin/python
OLD_SGLANG = 0.5.12

.PHONY: help demo test test-matrix audit fuzz lint type format bench bench-cost soak chaos venv develop clean

help:
	@echo "make demo [JSON=file]  a real SGLang server with simulated ranks, without and with the sidecar"
	@echo "make test              every test, on SGLang 0.5.23 and $(OLD_SGLANG)"
	@echo "make test-matrix       contract tests and live servers on every SGLang from 0.5.12 on (an hour)"
	@echo "  SGLANG=\"0.5.12 ...\"  only these   ONLY=\"contract plain\"  only these parts"
	@echo "make bench             A/B of policies on a model of 8 x H100: report in bench/out/"
	@echo "  FULL=1               every arm and setting; goes on where it was stopped"
	@echo "  TARGET=http://H:P    on a live server with the hook   MODEL=path  starts that server"
	@echo "make bench-cost        cost of a decision, the hook, the round trip, an outage; memory"
	@echo "make audit             known vulnerabilities of what the image installs; needs the network"
	@echo "make fuzz [RUNS=n]     inputs found by coverage for everything that reads what others send"
	@echo "  TARGET=name,name     some targets only"
	@echo "make soak              half an hour under churn and restarts: is memory flat, the load view exact?"
	@echo "  MINUTES=30 RATE=2000 queries a second; plot and samples in bench/out/soak/"
	@echo "make chaos [CHAOS=...]  faults under load, one after another (four minutes and up)"
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
	$(PYTHON_IN) -m tests.matrix $(if $(ONLY),--only "$(ONLY)") $(SGLANG)

# Its own environment: what audits is no dependency. --strict, or what is unknown passes as sound.
audit:
	@[ -x .audit/bin/pip-audit ] || { python3 -m venv .audit && .audit/bin/pip install --quiet pip-audit==2.10.1; }
	.audit/bin/pip-audit --strict --require-hashes --disable-pip -r deploy/container/requirements.txt

# Ends with 1 on a crash. What is found besides: `python -m tests.fuzz --merge` puts it into corpus/.
fuzz: venv
	@$(PYTHON_IN) -c 'import atheris' 2>/dev/null || $(PYTHON_IN) -m pip install --quiet --disable-pip-version-check atheris==3.0.0
	$(PYTHON_IN) -m tests.fuzz $(if $(RUNS),--runs $(RUNS)) $(if $(TARGET),--target $(TARGET))

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

soak: venv
	$(PYTHON_IN) -m bench.soak --minutes $(or $(MINUTES),30) --rate $(or $(RATE),2000)

chaos: venv
	$(PYTHON_IN) -m bench.chaos $(CHAOS)

clean:
	rm -rf .venv .audit .sglang .pytest_cache .hypothesis .mypy_cache .ruff_cache bench/out
