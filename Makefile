# Two commands on a fresh machine: `make demo` and `make test`. Every target may be repeated and is fast the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints/main.txt)
LOCK := uv pip compile --quiet --generate-hashes --no-deps --no-header --no-annotate --python-version 3.11
PIP := $(BIN)/python -m pip install --quiet --no-compile
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup lock audit demo test test-full test-gpu test-replaysim test-envs test-browser test-diloco test-prime test-monarch test-verl check format bench card student reference docs clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## a .venv with the pinned set, torch first

# torch goes in alone and pinned: asked for by another package it may arrive as a different, much larger build.
# Everything else is what constraints/main.hashes.txt names, file by file: another file of the same name is refused.
# pip would compile every module of every package, one after the other, which is most of the time: all cores do it, and
# leave out what is hardly ever imported (that is compiled when it is). Some packages hold files that are no Python.
RARE := /(tests?|transformers/models|torch/testing|pip|setuptools)/
$(STAMP): pyproject.toml constraints/main.hashes.txt constraints/triton.hashes.txt .ci/install_pinned
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	.ci/install_pinned $(BIN)/python
	$(PIP) --no-deps --no-build-isolation -e '.[dev,diloco,report,serverless,train]'
	$(BIN)/python -m pip check
	-$(BIN)/python -m compileall -qq -j 0 -x '$(RARE)' $(VENV)/lib src
	touch $(STAMP)

lock: ## constraints/*.hashes.txt from constraints/main.txt (needs uv)
	grep -vE '^(#|torch==|triton==)' constraints/main.txt | $(LOCK) -o constraints/main.hashes.txt -
	grep -E '^triton==' constraints/main.txt | $(LOCK) -o constraints/triton.hashes.txt -

audit: setup ## known holes in the pinned packages; ADVISORIES=FOLDER where there is no network
	PATH="$(BIN):$$PATH" $(BIN)/python .ci/audit.py

demo: setup ## all of it on generated sessions and a tiny model: training, control, evaluation, report
	$(BIN)/crf demo

# For a target of several commands: `run` prints and runs each, and `status` is not 0 at the end where one of them failed.
RUN_ALL := status=0; run() { echo "$$*"; "$$@" || status=1; }

# Much of the time is spent waiting for processes that tests start, so three workers keep two cores busy. A file stays
# with one worker, so that its fixtures are made once; the longest files come first (tests/conftest.py).
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -q -p no:cacheprovider -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
# Those have environments of their own.
NOT_ENGINES := not diloco and not monarch and not verl
test: setup ## all tests, long counts cut to a printed size
	$(PYTEST) -m 'not gpu and not full and $(NOT_ENGINES)'

test-full: setup ## all tests with the counts the issues name
	CRF_TEST_PROFILE=full $(PYTEST) --timeout 1800 -m 'not gpu and $(NOT_ENGINES)'

test-gpu: setup ## the kernels on a CUDA device
	$(BIN)/python -m pytest -q -m gpu tests/gpu

# data-juicer and TRL bring 2 GB of their own, so they have an environment of their own.
REPLAYSIM_VENV ?= .venv-replaysim
REPLAYSIM := $(REPLAYSIM_VENV)/bin/python
$(REPLAYSIM_VENV)/.installed: pyproject.toml constraints/replaysim.txt
	test -x $(REPLAYSIM) || $(PYTHON) -m venv $(REPLAYSIM_VENV)
	$(REPLAYSIM) -m pip install --quiet $(TORCH)
	$(REPLAYSIM) -m pip install --quiet -c constraints/replaysim.txt hatchling hypothesis pytest pytest-timeout trl
	$(REPLAYSIM) -m pip install --quiet -c constraints/replaysim.txt --no-build-isolation -e '.[replaysim]'
	touch $@

test-replaysim: $(REPLAYSIM_VENV)/.installed ## data-juicer's operators against ours, and TRL on the exported pairs
	$(REPLAYSIM) -m pytest -q -m replaysim tests/replaysim

# verifiers and OpenEnv want versions that our set does not, nor the other one's: an environment each, without torch.
ENGINES := verifiers openenv
$(ENGINES:%=.venv-%/.installed): .venv-%/.installed: pyproject.toml constraints/%.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --no-deps -r constraints/$*.txt
	.venv-$*/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

test-envs: $(ENGINES:%=.venv-%/.installed) ## the workspace in verifiers and OpenEnv, through their own clients
	@$(RUN_ALL); \
	run .venv-verifiers/bin/python -m pytest -q -m envs tests/adapters/test_verifiers_*.py; \
	run .venv-openenv/bin/python -m pytest -q -m envs tests/adapters/test_openenv_*.py; \
	exit $$status

# PRIME-RL is not on PyPI and runs on CUDA alone: what is tested is our side of its contract, on verifiers' own records and by
# our records of its fields and formulas. PRIME_RL_SOURCE=FOLDER names a checkout of it, whose own classes are then asked.
PRIME_COMMIT := 559b447
PRIME_VENV ?= .venv-prime
PRIME := $(PRIME_VENV)/bin/python
$(PRIME_VENV)/.installed: pyproject.toml constraints/prime.txt
	test -x $(PRIME) || $(PYTHON) -m venv $(PRIME_VENV)
	$(PRIME) -m pip install --quiet --no-compile $(TORCH)
	$(PRIME) -m pip install --quiet --no-compile --no-deps -r constraints/prime.txt
	$(PRIME) -m pip install --quiet --no-compile --no-deps --no-build-isolation -e .
	$(PRIME) -m pip check
	touch $@

test-prime: $(PRIME_VENV)/.installed ## the recipe for PRIME-RL: its algorithm, loss and configs against records of its contract
	@$(RUN_ALL); \
	run env PRIME_RL_SOURCE='$(PRIME_RL_SOURCE)' $(PRIME) -m pytest -q -p no:cacheprovider tests/recipes/prime_rl tests/adapters/test_verifiers_sites.py; \
	test -n '$(PRIME_RL_SOURCE)' || echo "The tests against PRIME-RL's own classes were skipped. To run them: git clone https://github.com/PrimeIntellect-ai/prime-rl FOLDER && git -C FOLDER checkout $(PRIME_COMMIT) && make test-prime PRIME_RL_SOURCE=FOLDER"; \
	exit $$status

# Playwright drives the Chromium that the machine has; the reports are built in the same environment, without torch.
BROWSER_VENV ?= .venv-browser
BROWSER := $(BROWSER_VENV)/bin/python
$(BROWSER_VENV)/.installed: pyproject.toml constraints/browser.txt
	test -x $(BROWSER) || $(PYTHON) -m venv $(BROWSER_VENV)
	$(BROWSER) -m pip install --quiet --no-deps -r constraints/browser.txt
	$(BROWSER) -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

test-browser: $(BROWSER_VENV)/.installed ## the report's pages in Chromium: themes, keys, phone, paper, hostile logs, axe
	$(BROWSER) -m pytest -q -p no:cacheprovider -m browser tests/browser

# modal, ray and moto (for S3) beside the tested set, and azurite (for Azure) by npm: 1.8 GB and 0.4 GB; the tests take three
# minutes. Ray's own processes outlive its objects, which pytest would call a leak.
DILOCO_VENV ?= .venv-diloco
DILOCO := $(DILOCO_VENV)/bin/python
AZURITE := .azurite/node_modules/.bin/azurite-blob
$(DILOCO_VENV)/.installed: pyproject.toml constraints/main.hashes.txt constraints/diloco.txt
	test -x $(DILOCO) || $(PYTHON) -m venv $(DILOCO_VENV)
	$(DILOCO) -m pip install --quiet --no-compile $(TORCH)
	$(DILOCO) -m pip install --quiet --no-compile --no-deps --require-hashes -r constraints/main.hashes.txt
	$(DILOCO) -m pip install --quiet --no-compile --no-deps -r constraints/diloco.txt
	$(DILOCO) -m pip install --quiet --no-compile --no-deps --no-build-isolation -e .
	$(DILOCO) -m pip check
	touch $@

$(AZURITE):
	npm install --silent --no-fund --no-audit --prefix .azurite azurite@3.37.0

test-diloco: $(DILOCO_VENV)/.installed $(AZURITE) ## replicas by Modal, the Hub's Jobs and Ray through their own clients; S3 and Azure
	@$(RUN_ALL); \
	run $(DILOCO) -m pytest -q -p no:cacheprovider -m diloco --ignore tests/executors/test_ray.py tests/executors tests/bucket_servers; \
	run env RAY_AUTH_MODE=disabled $(DILOCO) -m pytest -q -p no:cacheprovider -p no:unraisableexception -m diloco tests/executors/test_ray.py; \
	exit $$status

# Monarch beside the tested set: 0.4 GB more, 1.8 in all; the tests take four minutes. A process that was killed
# is found within a second instead of ten.
MONARCH_VENV ?= .venv-monarch
MONARCH := $(MONARCH_VENV)/bin/python
$(MONARCH_VENV)/.installed: pyproject.toml constraints/main.hashes.txt constraints/monarch.txt
	test -x $(MONARCH) || $(PYTHON) -m venv $(MONARCH_VENV)
	$(MONARCH) -m pip install --quiet --no-compile $(TORCH)
	$(MONARCH) -m pip install --quiet --no-compile --no-deps --require-hashes -r constraints/main.hashes.txt
	$(MONARCH) -m pip install --quiet --no-compile --no-deps -r constraints/monarch.txt
	$(MONARCH) -m pip install --quiet --no-compile --no-deps --no-build-isolation -e .
	$(MONARCH) -m pip check
	touch $@

test-monarch: $(MONARCH_VENV)/.installed ## a run by Monarch's actors, each of which is killed; twenty recorded steps
	HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY=1s $(MONARCH) -m pytest -q -p no:cacheprovider -m 'monarch or full' tests/recipes/monarch

# verl, ray and torch: 1.7 GB; the tests take seven minutes, most of it imports and steps.
VERL_VENV ?= .venv-verl
VERL := $(VERL_VENV)/bin/python
$(VERL_VENV)/.installed: pyproject.toml constraints/main.txt constraints/verl.txt
	test -x $(VERL) || $(PYTHON) -m venv $(VERL_VENV)
	$(VERL) -m pip install --quiet --no-compile $(TORCH)
	$(VERL) -m pip install --quiet --no-compile --no-deps -r constraints/verl.txt
	$(VERL) -m pip uninstall --quiet --yes composer-replication # of an earlier make: it declares a newer transformers
	$(VERL) -m pip check
	$(VERL) -m pip install --quiet --no-compile --no-deps --no-build-isolation -e .
	touch $@

test-verl: $(VERL_VENV)/.installed ## verl's engine on the CPU, its hooks and agent loop, and two of its workers under Ray
	$(VERL) -m pytest -q -p no:cacheprovider -m verl --timeout 900 tests/recipes/verl

check: setup ## format, lint, names, types
	@$(RUN_ALL); \
	run $(BIN)/ruff format --check .; \
	run $(BIN)/ruff check .; \
	run $(BIN)/python tests/contract/house_rules.py; \
	run $(BIN)/pyright; \
	exit $$status

format: setup ## write the format and the safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## the benchmark tables; on a machine without a GPU, at a small size
	$(BIN)/python benchmarks/jsd_kernel.py $(if $(wildcard /dev/nvidia0),,--rows 256 --hidden 64 --vocab 8000)
	$(BIN)/python benchmarks/sdpo_step.py $(if $(wildcard /dev/nvidia0),,--tiny)

card: setup ## what the embedded student does on held-out tasks, compared with its card (minutes)
	$(BIN)/python scripts/student/card.py

student: setup ## the embedded student from nothing: lessons, then five minutes of one GPU; says whether it is the committed one
	$(BIN)/python scripts/student/lessons.py runs/student/lessons --processes $(shell nproc)
	$(BIN)/python scripts/student/learning.py runs/student/lessons runs/student/weights

reference: setup ## docs/reference anew, from the code
	$(BIN)/python docs/reference/generate.py

# mkdocs needs nothing of ours, and we nothing of it: an environment of its own. Nothing is fetched while it builds.
# The variable silences the news that the theme is mended until May 2027 only; constraints/docs.txt says what then.
DOCS_VENV ?= .venv-docs
DOCS := $(DOCS_VENV)/bin/python
$(DOCS_VENV)/.installed: constraints/docs.txt
	test -x $(DOCS) || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS) -m pip install --quiet --no-deps -r constraints/docs.txt
	$(DOCS) -m pip check
	touch $@

docs: $(DOCS_VENV)/.installed ## the pages as a static site in site/, which asks no other host for anything
	NO_MKDOCS_2_WARNING=1 $(DOCS) -m mkdocs build --strict --quiet --clean
	$(DOCS) .ci/site_requests.py site

clean: ## remove what the other targets made
	rm -rf $(VENV) $(REPLAYSIM_VENV) $(DOCS_VENV) $(BROWSER_VENV) $(DILOCO_VENV) $(PRIME_VENV) $(MONARCH_VENV) $(VERL_VENV) .azurite $(ENGINES:%=.venv-%) site dist build .pytest_cache .ruff_cache .hypothesis
