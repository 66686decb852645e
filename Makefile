BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest --numprocesses auto
# What `make example` runs, of the environment.
PAWL ?= pawl
CODE := store proxy trainer controller console pawl migrations benchmarks examples plugins scripts tests

.DEFAULT_GOAL := help
.PHONY: help install demo example test slow serving compose-test check format docs site lock images release clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install:  ## make .venv with everything in it (PYTHON=python3.12: with this Python)
	@python=$$(PYTHON="$(PYTHON)" scripts/find_python.sh) && "$$python" scripts/install.py

demo: install  ## an agent gets better while it works, on this machine (ARGS="--seed 1")
	@$(BIN)/pawl demo $(ARGS)

example: install  ## an agent of a framework gets better while it works (NAME=math ARGS="--seed 7")
	@$(BIN)/python scripts/install_clients.py --python
	@$(BIN)/$(PAWL) example $(NAME) $(ARGS)

test: install  ## the tests of a change, all but the slow ones (ARGS="-k name": these, slow or not)
	@$(BIN)/python scripts/install_clients.py
	@$(PYTEST) --maxprocesses 4 $(if $(ARGS),$(ARGS),-m "not slow")

slow: install  ## the other tests: kills, full disks, a real vLLM for minutes
	@$(BIN)/python scripts/install_clients.py
	@$(PYTEST) --maxprocesses 2 -m slow $(ARGS)

serving:  ## the serving role's tests on another Python, without torch (PYTHON=python3.13)
	@python=$$(PYTHON="$(PYTHON)" scripts/find_python.sh) && "$$python" scripts/serving_tests.py $(ARGS)

compose-test:  ## docker-compose.yml for real: calls, an update, kills, a second start
	@python=$$(PYTHON="$(PYTHON)" scripts/find_python.sh) && "$$python" scripts/compose_test.py

check: install  ## ruff, mypy --strict, import-linter
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: install  ## format the code
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix $(CODE)

docs: install  ## generate docs/reference/ from the code
	@$(BIN)/python -m scripts.reference

site: install  ## the documentation as a site in build/site; a broken link is an error
	@rm -rf build/pages && mkdir -p build/pages
	@git ls-files "*.md" ":!tests" docs examples trainer/recipes controller/comparison.py | xargs cp --parents -t build/pages
	@$(BIN)/zensical build --strict

lock: install  ## lock all roles to exact versions again
	@scripts/lock.sh

images:  ## Pawl's container images, with the engine that is here or with one made here (ARGS="proxy cpu")
	@scripts/images.sh $(ARGS)

release: install  ## wheel, sdist, chart, images, SBOM and checksums in dist/, tried (ARGS="--without-images")
	@$(BIN)/python -m scripts.release $(ARGS)

clean:  ## remove .venv and everything that ran here
	@rm -rf .venv build dist .venv-clients tests/clients/node/node_modules var .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
