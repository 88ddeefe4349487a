# Everything a developer runs. Needs only Python (3.11 or newer) and make; the rest goes in .venv.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# For example: make test TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH_ARGS ?=
PYTEST_ARGS ?=
# For example: make bench-models BENCH_ARGS="--only gpt2 --threads 2 --write"
BENCH_ARGS ?=
# For example: make triton-suite SUITE=~/triton/python/test PYTEST_ARGS="-k softmax" DEVICE=gcu
SUITE ?=
DEVICE ?= cpu
LIBRARY ?=
SUITE_TESTS ?= $(addprefix unit/language/test_, core.py standard.py random.py block_pointer.py \
	tensor_descriptor.py conversions.py)
MINUTES ?= 5
MUTANTS ?= 5000

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet
USABLE := $(VENV)/.installed
TESTABLE := $(VENV)/.installed-with-test-tools
SHOWABLE := $(VENV)/.installed-with-peers
EXPORTING := $(VENV)/.installed-with-exporter

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help test test-slow test-gpu triton-suite triton-libraries torch-operators \
	inductor-suite openreg-suite device-operators lint demo bench bench-compile bench-gpu \
	bench-models bench-wild sklearn-zoo ulp verify fuzz fuzz-models docs clean

help: ## list what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1|\2/' \
		| while IFS='|' read -r name what; do printf '  %-18s %s\n' "$$name" "$$what"; done

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "terrazzo needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3" >&2; \
		exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(USABLE): pyproject.toml | $(BIN)/python
	@echo "installing terrazzo into $(VENV)"
	@$(PIP) --editable .
	@touch $@

# torch comes first and alone, so that no other requirement can choose a different one.
$(TESTABLE): pyproject.toml | $(BIN)/python
	@echo "installing $(TORCH) into $(VENV)"
	@$(PIP) $(TORCH_ARGS) "$(TORCH)" || { \
		echo "the tests compare with $(TORCH), which pip could not install for this Python and" >&2; \
		echo "platform; try another Python with: make test PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	@echo "installing terrazzo with its test tools into $(VENV)"
	@$(PIP) --editable ".[dev,triton,onnx]" "$(TORCH)"
	@touch $@ $(USABLE)

# Peers are there to be compared with: where pip has none for this Python, the demo does without.
$(SHOWABLE): pyproject.toml | $(BIN)/python
	@echo "installing terrazzo with onnxruntime and OpenVINO into $(VENV)"
	@$(PIP) --editable ".[bench]" || { \
		echo "pip has no onnxruntime or OpenVINO for this Python; going on without" >&2; \
		$(PIP) --editable ".[onnx]"; }
	@touch $@ $(USABLE)

$(EXPORTING): $(TESTABLE)
	@echo "installing what exports models from PyTorch, and the peers, into $(VENV)"
	@$(PIP) --editable ".[bench,zoo]" "$(TORCH)"
	@touch $@

test: lint ## check style and types, and run the tests
	$(BIN)/python -m pytest -q -n 2 -m "not slow" $(PYTEST_ARGS)

test-slow: $(TESTABLE) ## run the tests that take long
	$(BIN)/python -m pytest -q -n 2 -m slow $(PYTEST_ARGS)

test-gpu: $(TESTABLE) ## run the tests that need an NVIDIA GPU
	$(BIN)/python -m pytest -q -m gpu $(PYTEST_ARGS)

# The checkout is the user's own and stays as it is: no caches, no bytecode.
triton-suite: $(TESTABLE) ## run Triton's own tests on the CPU or DEVICE=gcu: SUITE=.../python/test
	@test -f "$(SUITE)/conftest.py" || { \
		echo "name the tests of a checkout of Triton: make $@ SUITE=path/to/triton/python/test" >&2; \
		exit 1; }
	@echo "installed: triton $$($(BIN)/python -c 'import triton; print(triton.__version__)');" \
		"the checkout: $$(sed -n "s/^__version__ = //p" "$(SUITE)/../triton/__init__.py" 2>/dev/null)"
	@$(BIN)/python -c "import scipy" 2>/dev/null || $(PIP) scipy
	cd "$(SUITE)" && PYTHONDONTWRITEBYTECODE=1 TRITON_DEFAULT_BACKEND=$(DEVICE) \
		$(abspath $(BIN))/python -m pytest --device $(DEVICE) -q -n 2 -p no:cacheprovider \
		$(SUITE_TESTS) $(PYTEST_ARGS)

# For example: make triton-libraries LIBRARY=~/attorch/tests BENCH_ARGS="--each 3 --stand-in"
triton-libraries: $(TESTABLE) ## run a Triton library's own tests on the CPU, from a checkout: LIBRARY=
	@test -e "$(LIBRARY)" || { \
		echo "name the tests of a library: make $@ LIBRARY=path/to/Liger-Kernel/test/transformers" >&2; \
		exit 1; }
	@$(BIN)/python benchmarks/triton_libraries.py "$(LIBRARY)" $(BENCH_ARGS)

# For example: make torch-operators BENCH_ARGS="--samples 0 --write"
torch-operators: $(TESTABLE) ## PyTorch's operator samples through torch.compile(backend="terrazzo")
	@$(BIN)/python benchmarks/torch_operators.py $(BENCH_ARGS)

# For example: make inductor-suite SUITE=~/pytorch/test/inductor/test_torchinductor.py
inductor-suite: $(TESTABLE) ## run Inductor's own tests with our backend, from a checkout: SUITE=
	@test -f "$(SUITE)" || { \
		echo "name the tests of a checkout of PyTorch $(TORCH):" \
			"make $@ SUITE=path/to/pytorch/test/inductor/test_torchinductor.py" >&2; exit 1; }
	@PYTHONDONTWRITEBYTECODE=1 $(BIN)/python benchmarks/inductor_suite.py "$(SUITE)" $(BENCH_ARGS)

# For example: make openreg-suite SUITE=~/pytorch BENCH_ARGS="--file test_storage"
openreg-suite: $(TESTABLE) ## run the tests of PyTorch's reference device for gcu, from a checkout: SUITE=
	@test -d "$(SUITE)/test/cpp_extensions" || { \
		echo "name a checkout of PyTorch $(TORCH): make $@ SUITE=path/to/pytorch" >&2; exit 1; }
	@$(BIN)/python -c "import psutil" 2>/dev/null || $(PIP) psutil
	@$(BIN)/python benchmarks/openreg_suite.py "$(SUITE)" $(BENCH_ARGS)

# For example: make device-operators BENCH_ARGS="--samples 0 --jobs 2"
device-operators: $(TESTABLE) ## PyTorch's operator samples on the device gcu, against the CPU
	@$(BIN)/python benchmarks/device_operators.py $(BENCH_ARGS)

lint: $(TESTABLE) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/mypy src

demo: $(SHOWABLE) ## an operator written, differentiated, verified, timed; ONNX models beside peers
	@$(BIN)/python examples/gelu.py
	@$(BIN)/python examples/run_onnx.py

bench: $(TESTABLE) ## time the operators against numpy and PyTorch
	@$(BIN)/python benchmarks/ops.py

bench-compile: $(TESTABLE) ## time compiling, and how it grows with a program's length
	@$(BIN)/python benchmarks/compile_time.py

# For example: make bench-gpu BENCH_ARGS="--seconds 300"; given again, it goes on where it ended.
bench-gpu: $(EXPORTING) ## check and time an NVIDIA GPU against PyTorch: kernels, operators, models
	@$(BIN)/python benchmarks/gpu_all.py $(BENCH_ARGS)

bench-models: $(EXPORTING) ## time five ONNX models against onnxruntime and OpenVINO
	@$(BIN)/python benchmarks/models.py $(BENCH_ARGS)

# torchvision without the torch it asks for: its models are Python, and that is all they need. In a
# folder of its own, as transformers uses any torchvision it finds.
bench-wild: $(EXPORTING) ## a hundred models of timm, torchvision and transformers beside onnxruntime
	@$(PIP) --no-deps --upgrade --target $(VENV)/wild timm torchvision pillow
	@PYTHONPATH=$(VENV)/wild $(BIN)/python benchmarks/wild.py $(BENCH_ARGS)

# As a target of its own, for these packages are large and nothing else needs them.
sklearn-zoo: $(SHOWABLE) ## run every estimator that skl2onnx converts against onnxruntime
	@$(PIP) scikit-learn skl2onnx onnxmltools lightgbm xgboost onnx
	@$(BIN)/python benchmarks/sklearn_zoo.py $(BENCH_ARGS)

ulp: $(TESTABLE) ## measure the accuracy of the elementary functions
	@$(BIN)/python benchmarks/ulp.py

verify: $(TESTABLE) ## verify every operator at every level, and write docs/verified.md
	@$(BIN)/python tests/tools/verify_operators.py --write docs/verified.md

fuzz: $(TESTABLE) ## compile random programs for MINUTES=5, every level checked against the one above
	@$(BIN)/tz fuzz --minutes $(MINUTES)

fuzz-models: $(TESTABLE) ## damage ONNX models in MUTANTS=5000 ways: each runs or is refused with a reason
	@$(BIN)/python tests/session/fuzz_models.py --mutants $(MUTANTS)

docs: $(TESTABLE) ## write the generated pages again
	@$(BIN)/python docs/generate.py

clean: ## remove what make made
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
