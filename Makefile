# The front door. Each target installs what it needs (tools/setup), builds, and runs; nothing is written outside this folder
# but system packages, and those only when run as root on Debian or Ubuntu.
#
#   TORCH_ROOT=<folder>  a LibTorch of yours instead of the pinned one      CXX=<compiler>  another compiler
#   JOBS=<n>             compilers at a time                                TEST_JOBS=<n>   tests at a time
#   FULL=1               benchmarks: the whole table                        PREFIX=<folder> where `make install` puts ebb

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-interop bench-micro docs install format tidy clean

CORES := $(shell nproc)
# A file that includes LibTorch takes the compiler some 2 GB.
JOBS ?= $(shell awk -v n=$(CORES) '/^MemAvailable/ { m = int($$2 / 2500000); print m < 1 ? 1 : m < n ? m : n }' /proc/meminfo)
# Most tests run 2 to 4 ranks of one thread each.
TEST_JOBS ?= $(shell echo $$(( $(CORES) < 8 ? $(CORES) : 8 )))
PREFIX ?= build/prefix
CONFIGURE = cmake -DTORCH_ROOT=$(abspath $(TORCH_ROOT)) --preset
BUILD = cmake --build -j $(JOBS) --preset
SOURCES = $(shell git ls-files '*.h' '*.cpp' '*.cu')
BENCHMARKS = $(sort $(notdir $(patsubst %/run,%,$(wildcard benchmarks/*/run))))

help: ## this list
	@echo 'make demo trains a GPT sharded over two ranks; make test builds and tests everything fast.'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-22s %s\n", $$1, $$2 }'
	@printf '  make bench-%-11sebb and its peers in turn; NAME is one of: $(BENCHMARKS)\n' NAME

demo: ## train a GPT on Jane Austen's novels, sharded over 2 local ranks, in a few minutes
	tools/setup
	$(CONFIGURE) release
	$(BUILD) release --target ebb
	build/release/apps/ebb/ebb train --config examples/demo.toml --nproc 2 --run-dir runs/demo

test: ## build and run every fast test
	tools/setup
	$(CONFIGURE) dev
	$(BUILD) dev
	rc=0; ctest --preset dev -j $(TEST_JOBS) --output-junit '$(CURDIR)/build/dev/tests.xml' || rc=$$?; \
	tools/check_parity --report build/dev/tests.xml || rc=$$((rc ? rc : 1)); exit $$rc

test-slow: ## sanitizers, random delays of communication, lost ranks (half an hour and more)
	tools/setup
	$(CONFIGURE) asan-ubsan
	$(BUILD) asan-ubsan
	$(CONFIGURE) dev
	$(BUILD) dev
	rc=0; ctest --preset asan-ubsan -j $(TEST_JOBS) || rc=1; ctest --preset slow || rc=1; \
	export EBB_TEST_DELAYS_US=1000 OMP_NUM_THREADS=1; \
	build/dev/modules/shard/shard_tests --gtest_brief=1 --gtest_filter='-*DryRun*' || rc=1; \
	build/dev/modules/train/train_tests --gtest_brief=1 || rc=1; exit $$rc

test-interop: ## install PyTorch and run the tests that compare with it
	tools/setup peers
	$(CONFIGURE) dev
	$(BUILD) dev
	ctest --preset interop

bench-%:
	@test -x benchmarks/$*/run || { echo "no benchmark '$*'; there are: $(BENCHMARKS)" >&2; exit 2; }
	tools/setup peers
	$(CONFIGURE) release
	$(BUILD) release
	benchmarks/$*/run

bench-micro: ## what one operator pays for sharding, and collectives by algorithm (Google Benchmark)
	tools/setup
	$(CONFIGURE) release
	$(BUILD) release --target fallback_bench collectives_bench
	build/release/benchmarks/fallback_bench
	build/release/benchmarks/collectives_bench

docs: ## guides and API reference, in build/docs/html
	tools/setup docs
	tools/docs

install: ## build for release and install under PREFIX
	tools/setup
	$(CONFIGURE) release
	$(BUILD) release
	cmake --install build/release --prefix '$(PREFIX)'

format: ## clang-format over every C++ file
	tools/setup lint
	clang-format -i $(SOURCES)

tidy: ## clang-tidy over every C++ file (long: it compiles without the precompiled header)
	tools/setup lint
	$(CONFIGURE) tidy
	$(BUILD) tidy

clean: ## remove builds and runs; keeps LibTorch and build/venv-peers
	rm -rf build/dev build/release build/asan-ubsan build/tidy build/cuda build/docs build/prefix runs
