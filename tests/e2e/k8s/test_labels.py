"""The labels of AMD's node labeller, written with the manifests' own account."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.k8s.api import eventually
from tests.e2e.k8s.cluster import NODE, Cluster, daemon

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]


@pytest.mark.usefixtures("account")
def test_the_node_is_labelled_by_its_gpus(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "amdvgpud.toml"
    file.write_text(
        f'simulate = "mi300x,rx9070xt"\nkube.labels = true\nkube.config = "{cluster.folder}/amdvgpud.kubeconfig"\n'
        f'kube.node_name = "{NODE}"\n'
    )

    def labels() -> dict[str, str]:
        found: dict[str, str] = cluster.api.node(NODE)["metadata"]["labels"]
        return {key: value for key, value in found.items() if "vram" in key}

    with daemon(cluster, "--config", str(file)):
        eventually("the labels", labels, 30)
    assert labels() == {
        "amd.com/gpu.vram.16G": "1",
        "amd.com/gpu.vram.192G": "1",
        "beta.amd.com/gpu.vram.16G": "1",
        "beta.amd.com/gpu.vram.192G": "1",
    }
