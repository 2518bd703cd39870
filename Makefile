# make demo    the main job on a simulated node, step by step; writes build/demo.json
# make test    lint, types and every tier of tests this machine can run
# make bench   the figures the README claims; writes build/bench.json
# make fuzz    the gate's readers fuzzed for FUZZ_SECONDS each (60); keeps what it finds in build/fuzz
# make chaos   10 000 rounds of random death, and every order of more processes: about half an hour
# make rocm-test   the real runtimes over softkfd: ROCM=5.2.3,5.7.1 (default) or all; writes build/rocm.json
# make lint    ruff, mypy --strict, import contracts
# make build   .venv with amdvgpud, the gate and softkfd built into it
#
# Each installs what it needs. That takes root or sudo for Debian packages; without, one line says what is missing.

PYTHON ?= python3
comma := ,
VENV := .venv
BIN := $(VENV)/bin
C_SOURCES := $(shell find shim softkfd cdi -name '*.[ch]' -o -name CMakeLists.txt -o -name '*.map' 2>/dev/null) CMakeLists.txt

.PHONY: build demo test bench fuzz chaos lint clean rocm-test
build: build/.built

demo: build
	$(BIN)/python demo/run.py

test: build/.tested lint
	$(BIN)/pytest $(ARGS)

bench: build/.tested
	$(BIN)/python bench/run.py

fuzz: build/.tested
	FUZZ_SECONDS=$${FUZZ_SECONDS:-60} $(BIN)/pytest tests/shim/test_fuzz.py $(ARGS)

chaos: build/.tested
	CHAOS_ROUNDS=$${CHAOS_ROUNDS:-10000} EXPLORE=long $(BIN)/pytest tests/shim/test_chaos.py tests/shim/test_explore.py $(ARGS)

rocm-test: build/.tested
	ROCM=$(or $(ROCM),5.2.3$(comma)5.7.1) $(BIN)/pytest tests/rocm $(ARGS)

lint: build/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

build/.venv: pyproject.toml scripts/setup
	scripts/setup build
	mkdir -p build
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet 'scikit-build-core>=0.11' 'cmake>=3.25' ninja 'cffi>=1.17'
	touch $@

build/.built: build/.venv $(C_SOURCES)
	$(BIN)/pip install --quiet --no-build-isolation --editable .
	touch $@

build/.tested: build/.built
	scripts/setup test
	$(BIN)/pip install --quiet --group test
	touch $@

clean:
	rm -rf build $(VENV)

# make packages      deb for Debian 12 and 13 and rpm, each in a clean root; to build/packages (3 minutes at first)
# make e2e-systemd   the same installed, upgraded and removed on machines whose PID 1 is systemd 252 and 257; rpm on 252
# make e2e-runtimes  docker, containerd and rootless podman of Debian 13, each with a slice, and their hooks; CRI-O too, once
#                    tests/e2e/systemd/crio has built it
# make e2e-slurm     the Slurm samples under a real Slurm of one node
# make e2e-vm        a driver that loads after the daemon, on a kernel of its own in an emulated machine (5 minutes)
# make e2e-image     the container image, built in both ways and run
# All of these as root, and none is part of make test.
.PHONY: packages e2e-systemd e2e-runtimes e2e-slurm e2e-vm e2e-image
packages:
	scripts/setup packages
	packaging/build bookworm trixie rpm

e2e-systemd: packages
	tests/e2e/systemd/run

e2e-runtimes:
	scripts/setup packages
	tests/e2e/systemd/check-on trixie runtimes docker.io docker-cli containerd podman crun runc uidmap dbus-user-session libpam-systemd

e2e-slurm:
	scripts/setup packages
	tests/e2e/systemd/check-on trixie slurm slurm-wlm munge

e2e-vm:
	scripts/setup packages
	scripts/setup vm
	tests/e2e/systemd/check-in-vm driver

e2e-image:
	scripts/setup packages
	scripts/setup test
	tests/e2e/container/run

# make stubs        what protoc makes of amdvgpud/serve/pb/*.proto, which is committed
.PHONY: stubs
stubs: build/.tested
	$(BIN)/python amdvgpud/serve/pb/generate.py

# make charts   the Helm chart with Helm's own engine and Kubernetes' schemas; renews packaging/kubernetes/amdvgpud.yaml
# make e2e-k8s  a cluster of one real node (kubelet, kube-apiserver, etcd, kube-scheduler, containerd), simulated GPUs, pods
#               (root, Go; the first time 10 minutes were seen on two processors, and more where HAMi's scheduler is built too;
#               tests/e2e/k8s/README.md)
.PHONY: charts e2e-k8s
charts: build/.tested
	$(BIN)/pip install --quiet --group charts
	$(BIN)/python packaging/kubernetes/render.py
	AMDVGPU_E2E=charts $(BIN)/pytest tests/packaging/charts tests/packaging/test_manifests.py $(ARGS)

e2e-k8s: build/.tested
	scripts/setup packages
	AMDVGPU_E2E=k8s $(BIN)/pytest tests/e2e/k8s $(ARGS)

# make e2e-dmem  the kernel's VRAM cap on containers and commands, on a kernel that has it, in an emulated machine (root; builds that
#                kernel at first: 20 minutes)
.PHONY: e2e-dmem
e2e-dmem:
	tests/e2e/vm/run
