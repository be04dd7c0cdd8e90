# Every command a person or CI types. `make demo` and `make test` do all their set-up on a fresh machine. All print a line of progress
# every few seconds.
#   PYTHON=python3 make gpu   uses that interpreter as it is: nothing is installed but the package itself
VENV   := .venv
RUN    := $(if $(PYTHON),$(PYTHON),$(VENV)/bin/python)
BASE   ?= python3
# The CUDA build of torch where there is something to compile or run CUDA with, the CPU build elsewhere. PyPI's wheel for x86-64
# Linux is a CUDA build, which runs without CUDA too; pip takes the smaller CPU build if it is pointed to PyTorch's CPU index
# (PIP_EXTRA_INDEX_URL). TORCH names another one.
CUDA   := $(shell command -v nvcc nvidia-smi 2>/dev/null | head -n 1)
# Triton, which a CPU build does not bring, is for the tests: its interpreter and its compiler need no GPU. A CUDA build asks for this one.
TORCH  ?= $(if $(CUDA),torch==2.11.0,torch==2.14.1 $(if $(filter Linux,$(shell uname)),triton==3.8.0))
GPU    := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
DEMO_READY := $(if $(PYTHON),,$(VENV)/.demo)
READY  := $(if $(PYTHON),,$(VENV)/.ready)
BUILT  := build/.built$(if $(PYTHON),-$(subst /,_,$(PYTHON)))
ALIVE  := .ci/alive
NVCC   := $(shell command -v nvcc)
SOURCES = setup.py pyproject.toml CMakeLists.txt $(shell find csrc tools/emulator -type f)

# Modules are compiled when they are first imported: most never are, and tests start hundreds of processes that import torch.
export PIP_COMPILE ?= 0
unexport PYTHONDONTWRITEBYTECODE

# The torch versions of `make abi`, the ends of what one binary serves. One in ABI_SAMPLE tests runs under each.
ABI_TORCH ?= 2.10.0 2.14.1
ABI_SAMPLE ?= 5
ABI := build/abi

# Two processes or more: a file of tests goes to one of them.
PYTEST := $(RUN) -m pytest --progress-every 10
SIDE_BY_SIDE := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: demo paper test test-all sanitized examples sass sass-sample ptx ptx-sample abi wheels gpu bench docs lint format mutants build clean

# The demo builds the parts that it runs, the CUDA kernels for the GPU that is here alone. A full build serves it too.
demo: $(if $(wildcard $(BUILT)),$(BUILT),$(BUILT)-demo)
	$(RUN) -m bench.train --out runs/demo $(ARGS)

# The table of Micikevicius et al. in the small, failures included: docs/paper.md. A run that is killed goes on where it was.
#   make paper ARGS="--task detector --column 'fp16 unscaled' --seed 0"      ARGS="--size large --device cuda" on a GPU
paper: $(BUILT)
	$(RUN) -m bench.paper --out runs/paper $(ARGS)

# Some cases of each test that needs neither GPU nor nvcc, the same ones each time; DRAW=7 draws others.
#   make test ARGS="--one-in 1 tests/optim"   all cases of a folder
SHARE ?= 8
TESTS := -m "not gpu and not nvcc" --ignore tests/ptx
test: $(BUILT)
	$(PYTEST) $(TESTS) $(SIDE_BY_SIDE) --one-in $(SHARE) $(ARGS)

# All of them: every case, every seed of the emulator, every form of the Triton GEMM compiled, bugs planted in every kernel, and the
# fuzzers for FUZZ_SECONDS each (300). Hours.
test-all: $(BUILT)
	$(PYTEST) $(TESTS) $(SIDE_BY_SIDE) --exhaustive $(ARGS)
	$(ALIVE) $(RUN) tests/emulator/mutate.py

# Raw ops on a CPU library that stops at undefined behaviour, which is compiled for it: minutes, seconds with ccache.
sanitized: $(BUILT)
	$(PYTEST) --exhaustive tests/build/test_undefined_behaviour.py $(ARGS)

# Every example, also those that `make test` skips where transformers, lightning or accelerate is absent, and the model families of
# transformers and torchvision. Each torchvision is for one torch: that which is here stays.
examples: $(BUILT)
	$(if $(PYTHON),,$(ALIVE) $(RUN) -m pip install --quiet --group test --group examples "torch==$$($(RUN) -c 'import torch; print(torch.__version__.partition("+")[0])')")
	EXAMPLES=all $(PYTEST) -m "not gpu" $(SIDE_BY_SIDE) tests/examples $(ARGS)

# The machine code of every kernel and every instance of the GEMM: registers, spills, bytes in flight, main loops, executed instructions.
# Needs nvcc, no GPU; without nvcc it fails. The sample is CI's.
SASS := --no-skips -m nvcc --ignore tests/build/test_workflows.py tests/build tests/emulator/test_vocabulary.py
sass: $(BUILT)-cuda
	$(PYTEST) --exhaustive $(SASS) $(ARGS)
sass-sample: $(BUILT)-cuda
	$(PYTEST) $(SASS) $(ARGS)

# The PTX of every kernel, executed on the CPU (docs/ptx.md, with times). Needs nvcc, no GPU. In parts, each of which may be run alone:
# all cases of the package's kernels under several schedules; what is counted; Triton's kernels, whose schedules are Triton's concern;
# a case of each test that wants a GPU; planted bugs.    make ptx SCHEDULES=12
# The sample is CI's: the default cases in one process each.
SCHEDULES ?= 4
PTX_PARTS := ptx-kernels ptx-counts ptx-triton ptx-tests ptx-mutants
.PHONY: $(PTX_PARTS)
ptx: $(PTX_PARTS)

ptx-sample: $(BUILT)-cuda
	$(PYTEST) --no-skips tests/ptx $(SIDE_BY_SIDE) $(ARGS)
ptx-kernels: $(BUILT)-cuda
	$(RUN) -m tests.ptx.run --exhaustive --ptx-seeds $(SCHEDULES) -k "not executed_triton" $(ARGS)
ptx-counts: $(BUILT)-cuda
	$(PYTEST) --exhaustive tests/ptx -k "not executed and not want_a_gpu" $(ARGS)
ptx-triton: $(BUILT)-cuda
	$(RUN) -m tests.ptx.run --exhaustive tests/ptx/executed_triton.py $(ARGS)
ptx-tests: $(BUILT)-cuda
	$(RUN) -m tests.ptx.run -m gpu --each 1 tests/ops tests/gpu $(ARGS)
ptx-mutants: $(BUILT)-cuda
	$(ALIVE) $(RUN) -m tests.ptx.mutate

# The wheel built here, tested under other versions of torch. Each brings 5 to 7 GB, which go when its tests have passed. The wheel's
# _nodes is for the torch that it was built with; against the others its sources are compiled, as one, into nothing.
abi: $(addprefix $(ABI)/,$(ABI_TORCH))

$(ABI)/wheel: $(BUILT)$(if $(NVCC),-cuda)
	rm -rf $@
	AMP_KERNELS_EMULATOR=1 $(ALIVE) $(RUN) -m pip wheel . --quiet --no-deps --no-build-isolation -w $@

.PHONY: $(addprefix $(ABI)/,$(ABI_TORCH))
$(addprefix $(ABI)/,$(ABI_TORCH)): $(ABI)/%: $(ABI)/wheel
	test -x $@/bin/python || $(BASE) -m venv $@
	$(ALIVE) $@/bin/python -m pip install --quiet --no-cache-dir "torch==$*" pytest pytest-xdist hypothesis mpmath "numpy<2.4"
	$@/bin/python -m pip install --quiet --no-deps --force-reinstall $(ABI)/wheel/*.whl
	printf '#include "%s"\n' $(CURDIR)/csrc/autograd/*.cpp | $(CXX) -std=c++20 -fsyntax-only -Icsrc $$($@/bin/python -c "import sysconfig, torch; \
	  at = torch.__path__[0] + '/include'; print('-isystem', at, '-isystem', at + '/torch/csrc/api/include', '-isystem', sysconfig.get_paths()['include'])") -x c++ -
	cd $(ABI) && $*/bin/python -m amp_kernels info --check
	cd $(ABI) && $*/bin/python -m pytest --progress-every 10 $(SIDE_BY_SIDE) --sample $(ABI_SAMPLE) ../../tests/ops ../../tests/optim ../../tests/amp ../../tests/nn ../../tests/registration
	rm -rf $@

# dist/: a CPU wheel, a CUDA wheel where there is nvcc (all architectures: ten minutes on two cores), the source distribution; each checked.
# The wheels' Python modules are for $(RUN) and for these interpreters, those of the list that are here.
#   make wheels VARIANTS=cpu PYTHONS=
PYTHONS ?= $(shell for v in 10 11 12 13 14; do python3.$$v -c 'import sys; print(sys.executable)'; done 2>/dev/null)
VARIANTS ?= cpu $(if $(NVCC),cuda)
wheels: $(READY)
	$(if $(PYTHON),,$(RUN) -m pip install --quiet --group wheels)
	for variant in $(VARIANTS); do $(RUN) .ci/wheels.py build --variant $$variant --out dist $(PYTHONS) || exit 1; done
	$(RUN) .ci/wheels.py check dist/*.whl
	$(RUN) -m build --sdist --no-isolation --outdir dist
	$(RUN) -m twine check --strict dist/*

# On a machine with a GPU, with or without a network. A missing GPU is an error, a skipped test too; so it is looked for first.
# What is not built yet is built for that GPU alone, unless TORCH_CUDA_ARCH_LIST says otherwise.
gpu: $(READY)
	$(RUN) -m bench.gpu --check
	$(MAKE) build
	$(RUN) -m bench.gpu $(ARGS)

bench: $(BUILT)
	$(RUN) -m bench.run $(ARGS)

mutants: $(READY)
	$(ALIVE) $(RUN) tests/emulator/mutate.py $(ARGS)

# The site, from docs/ and the docstrings, into build/site; a warning is an error. The package is read, not imported: no torch.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(ALIVE) $(VENV)/bin/mkdocs build --strict

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	git ls-files -co --exclude-standard '*.h' '*.cuh' '*.cu' '*.cpp' | xargs $(VENV)/bin/clang-format --dry-run -Werror
	$(ALIVE) $(VENV)/bin/mypy

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	git ls-files -co --exclude-standard '*.h' '*.cuh' '*.cu' '*.cpp' | xargs $(VENV)/bin/clang-format -i

build: $(BUILT)

$(VENV)/bin/python:
	$(BASE) -m venv $(VENV)
	$@ -m pip install --quiet --upgrade pip "setuptools>=77" wheel

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@echo "Setting up $(VENV) with $(TORCH) ($(if $(CUDA),found $(CUDA),no CUDA toolkit or GPU found)); a CUDA build is a download of 3 GB"
	$(ALIVE) $(VENV)/bin/python -m pip install --progress-bar on $(TORCH)
	$(ALIVE) $(VENV)/bin/python -m pip install --quiet --group demo
	touch $@

$(VENV)/.ready: $(VENV)/.demo
	$(ALIVE) $(VENV)/bin/python -m pip install --quiet --group test --group lint
	touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/bin/python
	$(ALIVE) $(VENV)/bin/python -m pip install --quiet --group docs
	touch $@

# $(call compile,variables of setup.py). The editable install finds everything built.
define compile
	$(1) $(ALIVE) $(RUN) setup.py --quiet build_ext --inplace
	$(if $(PYTHON),,$(1) PYTHONWARNINGS=ignore $(RUN) -m pip install --quiet --no-build-isolation --no-deps -e .)
	mkdir -p build && touch $@
	$(RUN) -m amp_kernels info --brief
endef

# What runs here: no CUDA kernels without a GPU, and those for this GPU alone, unless TORCH_CUDA_ARCH_LIST says otherwise.
PARTS := cpu host nodes$(if $(GPU), cuda)
ARCHS := $(if $(GPU),TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-native}")

$(BUILT): $(SOURCES) $(READY)
	$(call compile,$(ARCHS) AMP_KERNELS_PARTS="$(PARTS) emulated")

$(BUILT)-demo: $(SOURCES) $(DEMO_READY)
	$(call compile,$(ARCHS) AMP_KERNELS_PARTS="$(PARTS)")

# The CUDA library of `make sass` and `make ptx`, for all architectures: 850 core seconds
$(BUILT)-cuda: $(SOURCES) $(READY)
	$(call compile,AMP_KERNELS_FORCE_CUDA=1)

clean:
	rm -rf build dist *.egg-info amp_kernels/*.so amp_kernels/_build_info.json runs
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
