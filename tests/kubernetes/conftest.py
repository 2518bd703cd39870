"""A folder for a daemon, and a kubelet for it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.serve.kube.kubelet import Kubelet, a_kubelet


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not tmp_path: a socket's path has to fit 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="avg") as folder:
        yield Path(folder)


@pytest.fixture
async def kubelet(folder: Path) -> AsyncIterator[Kubelet]:
    async with a_kubelet(folder / "kubelet" / "device-plugins") as kubelet:
        yield kubelet


def kubelet_options(kubelet: Kubelet, mode: str) -> list[str]:
    return [
        f"--kubelet-mode={mode}",
        f"--kubelet-dir={kubelet.dir}",
        f"--kubelet-pod-resources={kubelet.pod_resources_socket}",
    ]
