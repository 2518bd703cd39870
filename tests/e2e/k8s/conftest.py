"""The cluster of these tests: started once, by ``make e2e-k8s`` only; see README.md."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from tests.e2e.conftest import _corner
from tests.e2e.k8s.api import Api
from tests.e2e.k8s.cluster import IMAGE, STATIC, Cluster

# On demand: it compiles a kubelet. Asked for, it runs or fails; not asked for, its files are not even read.
collect_ignore_glob = [] if "k8s" in os.environ.get("AMDVGPU_E2E", "").split(",") else ["test_*.py"]

HERE: Final = Path(__file__).resolve().parent
REPOSITORY: Final = HERE.parents[2]
MANIFESTS: Final = REPOSITORY / "packaging/kubernetes/amdvgpud.yaml"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """HAMi's own scheduler last: it stays until the cluster ends, and writes on the node that others look at."""
    items.sort(key=lambda item: item.path.name in ("test_hami.py", "test_hami_recorded.py"))


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder with the real kubelet and the others."""
    built = subprocess.run([str(HERE / "build")], stdout=subprocess.PIPE, text=True, check=True)
    return Path(built.stdout.strip())


@pytest.fixture(scope="session")
def hami_scheduler() -> Path:
    """HAMi's scheduler: the one that is named, or else the one that the Go proxy has the source of.

    Where it has not, what needs it is not run, and the summary says so: the rest of the tests has HAMi's words written
    by themselves, and recorded ones.
    """
    if named := os.environ.get("AMDVGPU_E2E_HAMI"):
        assert os.access(named, os.X_OK), f"AMDVGPU_E2E_HAMI={named}: there is no such program"
        return Path(named)
    built = subprocess.run([str(HERE / "build-hami")], capture_output=True, text=True, check=False)
    if built.returncode == 3:
        pytest.skip(f"NOT RUN: pods of HAMi's own scheduler. {built.stderr.strip()}; name one in AMDVGPU_E2E_HAMI")
    assert built.returncode == 0, built.stderr
    return Path(built.stdout.strip())


@pytest.fixture(scope="session")
def daemon_root() -> Path:
    """The root file system of amdvgpud's own image, of the last commit: packages and image as they are for use."""
    tree = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], cwd=HERE, capture_output=True, text=True, check=True)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("AMDVGPU_E2E_CACHE") or Path(home, "amdvgpud-e2e"))
    root = cache / f"daemon-image-{tree.stdout.strip()[:12]}.tar"
    if not root.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            build = ["packaging/build", "--into", work, "trixie"]
            subprocess.run(build, cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=True)
            for old in cache.glob("daemon-image-*.tar"):
                old.unlink()
            environment = {**os.environ, "PACKAGES": f"{work}/trixie"}
            build = ["packaging/container/build", "--root", f"{work}/root.tar"]
            subprocess.run(build, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, check=True)
            Path(work, "root.tar").rename(root)
    return root


@pytest.fixture(scope="session")
def cluster(
    programs: Path,
    containers_conf: Path,
    glibc_tar: Path,
    static_tar: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """A cluster node that is ready, without a device plugin and without HAMi."""
    for corner in _corner(containers_conf, "runc", "as-is", {}):
        made = Cluster.prepare(corner, programs, tmp_path_factory.mktemp("cluster"))
        try:
            made.start_etcd()
            made.start_containerd({IMAGE: glibc_tar, STATIC: static_tar})
            made.start_apiserver()
            made.start_scheduler()
            made.start_kubelet()
            yield made
        finally:
            made.end()


@pytest.fixture(scope="session")
def hami_runs(hami_scheduler: Path, cluster: Cluster) -> None:
    """HAMi's scheduler, until the cluster ends."""
    cluster.start_hami(hami_scheduler)


@pytest.fixture(scope="session")
def account(cluster: Cluster) -> Api:
    """The API as the manifests' service account has it: with their roles, by a token that the API server made."""
    for item in yaml.safe_load_all(MANIFESTS.read_text()):
        if item["kind"] == "ServiceAccount" or "Role" in item["kind"]:
            cluster.api.apply_object(item)
    path = "/api/v1/namespaces/kube-system/serviceaccounts/amdvgpud/token"
    token = cluster.api.call("POST", path, {"spec": {"expirationSeconds": 7200}})["status"]["token"]
    cluster.kubeconfig("amdvgpud", token)
    return Api(cluster.api.port, cluster.api.ca, token)
