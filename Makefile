# Each target does what it needs, from nothing. CI runs the same ones.
.DEFAULT_GOAL := help
SHELL := /bin/bash

# No address is exported here: the settings' defaults are the local servers, and an exported one would beat .env.

PYTHON ?= python3
ARGS ?=
# A file's tests share servers of their own, which the end of another worker would stop under them: hence loadfile.
# Of the longer suites, what the newest broker must stand as well.
OUTAGES := policies hosts database_outages crashes chaos

.PHONY: help setup servers demo run test test-all test-longer check contract-release format image asyncapi lock clean

help: ## Say what there is.
	@grep -hE '^[a-z0-9.%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: .venv/.complete ## Make .venv with everything in it, from the hash-pinned lock.

.venv/.complete: requirements-dev.lock pyproject.toml scripts/setup
	@scripts/setup $(PYTHON)

servers: setup ## Make PostgreSQL and RabbitMQ usable on localhost: find, start or install them.
	@scripts/servers

demo: servers ## Show what the service guarantees, on real servers: crashes, restarts, an audit; ARGS are the demo's.
	@.venv/bin/billing demo $(ARGS)

run: servers ## Run the service against them, schema migrated, until Ctrl-C.
	@exec .venv/bin/billing run --migrate

test: setup ## Run all tests against real servers; ARGS are pytest's.
	@scripts/servers local
	.venv/bin/pytest -n 4 $(ARGS)

test-all: setup ## Run the tests that need a broker on RabbitMQ 3.10, 4.0 and 4.3, and say what ran; ARGS are pytest's.
	@scripts/servers local
	@scripts/test-all $(ARGS)

test-4.%: setup ## Run the tests that need a broker on RabbitMQ 4.0 or 4.3, made beside the local one; needs root.
	@scripts/servers local
	@scripts/broker 4.$*
	BILLING_TEST_RABBITMQ=4.$* .venv/bin/pytest -n 3 --dist loadfile tests/integration tests/acceptance \
		tests/contract/test_behaviour.py $(addprefix tests/longer/test_,$(OUTAGES:=.py)) $(ARGS)

test-longer: setup ## Run what takes longer: the demo against a broken service, a cluster, Chromium, the alert rules.
	@scripts/servers local
	@scripts/browser
	@scripts/promtool
	.venv/bin/pytest -n 2 --dist loadfile tests/longer $(ARGS)

check: setup ## Lint, format, types, import contracts, asyncapi.yaml up to date and breaking nobody.
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	@.venv/bin/billing asyncapi | diff -u asyncapi.yaml - || { echo "asyncapi.yaml is stale: run make asyncapi" >&2; exit 1; }
	.venv/bin/python -m tools.contract_gate asyncapi.yaml docs/contract
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache

contract-release: check ## Keep asyncapi.yaml as the contract of its version's release, in docs/contract.
	.venv/bin/python -m tools.contract_gate asyncapi.yaml docs/contract --release

format: setup ## Format the code.
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

image: setup ## Lint the Dockerfile, run its steps in Debian folders, and try the result; needs root.
	.venv/bin/hadolint Dockerfile
	@scripts/servers local
	@.venv/bin/python scripts/image

asyncapi: setup ## Generate asyncapi.yaml and the JSON Schemas from the code.
	@.venv/bin/billing asyncapi > asyncapi.yaml.new && mv asyncapi.yaml.new asyncapi.yaml || { rm -f asyncapi.yaml.new; exit 1; }
	.venv/bin/python -m schemas schemas/json

lock: setup ## Pin every version with its hashes; needs the package registry.
	.venv/bin/python -m pip install --quiet uv
	scripts/lock .venv/bin/uv

clean: ## Remove what can be made again.
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
