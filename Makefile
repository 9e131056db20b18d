# Two commands do everything on a fresh Debian machine that has Rust: `make demo` and `make test`.
# Build output goes to $(TARGET), outside the checkout when CI sets CARGO_TARGET_DIR.

.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

# One librocksdb.a for all profiles and folders: see scripts/rocksdb.
ROCKSDB = eval "$$(scripts/rocksdb)"
TARGET = $${CARGO_TARGET_DIR:-target}
BENCH ?=
DRILL ?=
DURATION ?= 60s
LOOKUPS ?= 1000000000
SEED ?= 1

.PHONY: help setup demo test test-python test-rdma wheel bench bench-python bench-reference drills large fuzz lint verify fix docs

help: ## What there is.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: ## Install what is missing of the system packages.
	@scripts/setup

demo: setup ## Build, run one node on a real trace, kill it, watch it come back.
	$(ROCKSDB) && cargo build --locked --release -p tidepool-server
	scripts/demo "$(TARGET)/release/tidepool"

test: setup ## All tests: unit, property, crash, fault and process tests, and the docs' examples.
	@[ "$$(id -u)" -ne 0 ] || scripts/setup ip nft
	$(ROCKSDB) && scripts/test

test-python: setup ## The Python packages, against a real node. PYTHON chooses the interpreter.
	$(ROCKSDB) && scripts/test-python

test-integrations: setup ## The storage code of SGLang, LMCache and vLLM, from their wheels, and torch (5 GB), against a real node.
	$(ROCKSDB) && scripts/test-integrations

wheel: setup ## Wheels of the Python packages, in dist/ of the build output, tried in an environment of their own.
	$(ROCKSDB) && scripts/wheel

test-rdma: setup ## RDMA on soft-RoCE devices, in a virtual machine (fetches a kernel and QEMU by apt).
	scripts/test-rdma

bench: setup ## Every figure beside its limit, measured in one run. BENCH=name runs one.
	scripts/setup fio iperf3
	$(ROCKSDB) && cargo build --locked --release -p tidepool-server -p tidepool-stress -p tidepool-transfer
	[ "$(BENCH)" = cuts ] || "$(TARGET)/release/tidepool-stress" bench $(BENCH)
	[ -n "$(BENCH)" -a "$(BENCH)" != cuts ] || scripts/bench-cuts

drills: setup ## Failover drills on real processes, the history checked, and 10^9 reads of reused memory. DRILL=name runs one; DURATION, SEED, LOOKUPS.
	@[ "$$(id -u)" -ne 0 ] || scripts/setup ip nft mkfs.ext4 fsfreeze
	$(ROCKSDB) && cargo build --locked --release -p tidepool-server -p tidepool-stress
	[ "$(DRILL)" = lookups ] || "$(TARGET)/release/tidepool-stress" drill $(DRILL) --duration $(DURATION) --seed $(SEED)
	[ -n "$(DRILL)" -a "$(DRILL)" != lookups ] || "$(TARGET)/release/tidepool-stress" lookups --lookups $(LOOKUPS)

bench-python: setup ## The Python package beside the Rust client, its import, and 10 million operations.
	$(ROCKSDB) && scripts/bench-python

bench-reference: setup ## The Python modules beside Mooncake's own wheel from PyPI, in one run.
	$(ROCKSDB) && scripts/bench-reference

large: setup ## Values of 2 to 5 GiB through a node, every byte compared.
	$(ROCKSDB) && cargo build --locked --release -p tidepool-server
	scripts/large-values "$(TARGET)/release/tidepool"

fuzz: setup ## Every decoder, FUZZ_SECONDS (60) each, or FUZZ=name (installs a nightly compiler and cargo-fuzz).
	$(ROCKSDB) && scripts/fuzz $(FUZZ)

lint: setup ## Format and lints, without writing anything.
	cargo fmt --all --check
	$(ROCKSDB) && cargo clippy --locked --workspace --all-targets -- -D warnings
	$(ROCKSDB) && RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --quiet

verify: lint test test-python ## What CI checks.

fix: ## Format, and apply what the lints suggest.
	cargo fmt --all
	$(ROCKSDB) && cargo clippy --workspace --all-targets --fix --allow-dirty

docs: ## The book, in docs/book (needs mdbook: cargo install mdbook).
	mdbook build docs
