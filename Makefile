# `make run` and `make test` each work as the only command after a clone.
# Stamps remember what was done: a second call starts at once. What the machine
# itself must bring (Python, gcc, Java) is checked, and named, by .ci/need.

VENV   := .venv
BIN    := $(VENV)/bin
PYTHON_IN_VENV := $(BIN)/python

# The extras of pyproject.toml that `make setup` installs.
EXTRAS := dev,spark

# More arguments for the target's program: make test ARGS="-k fanout -x"
ARGS   ?=

# How long `make soak` fuzzes each target.
FUZZ_SECONDS ?= 120

# How long `make soak` stresses the pump's threads, in total.
THREAD_SECONDS ?= 600

# Tests spend half of their time waiting: four processes share them and keep two cores
# busy. They take a file at a time, in the order of tests/conftest.py.
SHARED := -n 4 --dist loadfile --no-loadscope-reorder

# Fault tests that run under a sabotage in `make test`, chosen by the commit. Six mutants are
# drawn beside them (tests/unit/testing/test_mutant_sample.py).
SAMPLE := --sabotage-sample 14

# What pytest answers when nothing is marked so (yet).
NO_TESTS := 5

# The extras are part of the stamp's name: adding one installs it everywhere.
comma  := ,
VENV_STAMP   := $(VENV)/.stamp-$(subst $(comma),-,$(EXTRAS))
KERNEL_STAMP := $(VENV)/.stamp-kernel
CLASSES_STAMP := $(VENV)/.stamp-classes
KERNEL_FILES := $(shell find src -name '*.pyx' -o -name '*.pxd' -o -name '*.h')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run test check bench soak asan fuzz threads sabotage mutants demo clean

help: ## print this table
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(KERNEL_STAMP) $(CLASSES_STAMP) ## create .venv with everything, and compile the kernel

run: setup ## serve the bus with its data in ./data
	@$(BIN)/polybus serve --data ./data $(ARGS)

# Hundreds of programs start in the tests: what one has compiled, the next one finds.
test: export PYTHONDONTWRITEBYTECODE :=
test: setup ## run the tests
	@.ci/need java
	@.ci/need command chromium chromium || echo "polybus: without it the report is not looked at" >&2
	@mkdir -p build; log=build/test.log; \
	{ $(PYTHON_IN_VENV) -m pytest -q $(SHARED) $(SAMPLE) $(ARGS); echo $$? > build/test.code; } 2>&1 | tee $$log; \
	code=$$(cat build/test.code); [ $$code -eq 0 ] && exit 0; [ $$code -eq 1 ] || exit $$code; \
	echo "polybus: running the failed tests three more times; a test that passes all is FLAKY"; \
	$(PYTHON_IN_VENV) .ci/retry.py $$log $(ARGS)

check: setup ## lint, formatting, types, import contracts, words
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(PYTHON_IN_VENV) .ci/imports.py
	@$(PYTHON_IN_VENV) .ci/words.py
	@$(PYTHON_IN_VENV) .ci/guarantees.py --check
	@$(PYTHON_IN_VENV) .ci/proto.py --check

bench: setup ## the short benchmarks, beside their peers
	@.ci/need command redis-server redis-server
	@.ci/need command dbus-daemon dbus-daemon
	@.ci/need command dbus-broker dbus-broker
	@.ci/need java
	@$(PYTHON_IN_VENV) -m bench $(ARGS)

soak: asan fuzz threads sabotage mutants ## the long tests: sanitizers, fuzzing, sabotage, all marked soak, a grown store
	@.ci/need java
	@$(PYTHON_IN_VENV) -m pytest -q -m soak --timeout 3600 $(ARGS) || [ $$? -eq $(NO_TESTS) ]
	@$(PYTHON_IN_VENV) -m pytest -q -m soak --sabotage --timeout 3600 $(ARGS) || [ $$? -eq $(NO_TESTS) ]
	@$(PYTHON_IN_VENV) -m bench store --soak --check

asan: setup ## kernel tests under AddressSanitizer
	@tests/asan.sh

fuzz: setup ## coverage-guided fuzzing of the kernel, FUZZ_SECONDS a target
	@tests/fuzz.sh $(FUZZ_SECONDS)

threads: setup ## the pump's threads under ThreadSanitizer and AddressSanitizer, THREAD_SECONDS in total
	@$(PYTHON_IN_VENV) -m tests.rig.pump_stress $(THREAD_SECONDS)

sabotage: setup ## fault tests with the thing they guard broken: each must turn red
	@$(PYTHON_IN_VENV) -m pytest -q --sabotage $(ARGS) || [ $$? -eq $(NO_TESTS) ]

mutants: setup ## break the code on purpose, in a hundred small ways: the tests must notice each
	@$(PYTHON_IN_VENV) tests/mutants/run.py
	@$(PYTHON_IN_VENV) tests/mutants/blocks.py
	@$(PYTHON_IN_VENV) tests/mutants/bus.py
	@$(PYTHON_IN_VENV) tests/mutants/policy.py
	@$(PYTHON_IN_VENV) tests/mutants/freud.py
	@$(PYTHON_IN_VENV) tests/mutants/store.py
	@$(PYTHON_IN_VENV) tests/mutants/durable.py
	@$(PYTHON_IN_VENV) tests/mutants/writer.py
	@$(PYTHON_IN_VENV) tests/mutants/port.py
	@$(PYTHON_IN_VENV) tests/mutants/groups.py
	@$(PYTHON_IN_VENV) tests/mutants/fdq_producer.py
	@$(PYTHON_IN_VENV) tests/mutants/fdq_consumer.py
	@$(PYTHON_IN_VENV) tests/mutants/fdq.py
	@$(PYTHON_IN_VENV) tests/mutants/pirate.py
	@$(PYTHON_IN_VENV) tests/mutants/gsb.py
	@$(PYTHON_IN_VENV) tests/mutants/gsb_calls.py
	@$(PYTHON_IN_VENV) tests/mutants/gsb_network.py
	@$(PYTHON_IN_VENV) tests/mutants/pirate_client.py

demo: setup ## a bus, a sink and a pusher for a few seconds
	@$(PYTHON_IN_VENV) examples/demo.py

clean: ## remove .venv and everything built (./data stays)
	rm -rf $(VENV) build dist .pytest_cache .hypothesis src/*.egg-info
	find src -name '*.so' -delete
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

# The package is linked without its kernel, which is compiled as the next step: a
# kernel that does not compile shows the compiler's words, not a page from pip.
$(VENV_STAMP): pyproject.toml setup.py
	@echo "polybus: installing into $(VENV) (once; a minute or two)"
	@.ci/need compiler
	@python=$$(.ci/need python) && \
	{ $(PYTHON_IN_VENV) -c '' 2>/dev/null || "$$python" -m venv --clear $(VENV); }
	@POLYBUS_SKIP_KERNEL=1 $(PYTHON_IN_VENV) -m pip install -q --disable-pip-version-check \
		-e '.[$(EXTRAS)]'
	@.ci/need java || echo "polybus: all but Spark works without it" >&2
	@touch $@

# setup.py holds the compiler's flags: when it changed, everything is compiled again.
$(KERNEL_STAMP): $(VENV_STAMP) setup.py $(KERNEL_FILES)
	@$(PYTHON_IN_VENV) setup.py -q build_ext --inplace $(if $(filter setup.py,$?),--force)
	@touch $@

# Sessions of Spark start in half the time with it (spark/spark_session.py), and work without.
$(CLASSES_STAMP): $(VENV_STAMP) | $(KERNEL_STAMP)
	@! command -v java >/dev/null || { \
	  echo "polybus: laying out Spark's classes (once; half a minute)"; \
	  $(PYTHON_IN_VENV) -m tests.rig.spark.class_archive; } || \
	  echo "polybus: that failed; Spark will start slower, and work" >&2
	@touch $@
