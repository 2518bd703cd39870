"""A folder for a daemon, and a kubelet and an API server for it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.serve.kube.fake_kubeapi import FakeKubeApi
from tests.serve.kube.kubelet import Kubelet, a_kubelet
from tests.serve.kube.stage import HERE


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not tmp_path: a socket's path has to fit 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="avg") as folder:
        yield Path(folder)


@pytest.fixture
async def kubelet(folder: Path) -> AsyncIterator[Kubelet]:
    async with a_kubelet(folder / "kubelet" / "device-plugins") as kubelet:
        yield kubelet


@pytest.fixture
async def api(folder: Path) -> AsyncIterator[FakeKubeApi]:
    fake = FakeKubeApi()
    fake.add_node(HERE)
    server = await fake.start()
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "c", "user": {}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    yield fake
    await fake.stop()


def kubelet_options(kubelet: Kubelet, mode: str) -> list[str]:
    return [
        f"--kubelet-mode={mode}",
        f"--kubelet-dir={kubelet.dir}",
        f"--kubelet-pod-resources={kubelet.pod_resources_socket}",
    ]


ENVIRONMENT = {**os.environ, "NODE_NAME": HERE}
"""As a DaemonSet names it."""
