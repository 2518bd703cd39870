"""How many devices of a name the Node has, by the API's word."""

from __future__ import annotations

from pathlib import Path

import pytest

from amdvgpud.kubernetes import _counting
from amdvgpud.settings import read_settings
from tests.kubernetes.conftest import ENVIRONMENT
from tests.serve.kube.fake_kubeapi import FakeKubeApi
from tests.serve.kube.stage import HERE


@pytest.mark.parametrize(("text", "count"), [("7", 7), ("0", 0), ("1k", 1000), ("1x", None), (None, None)])
async def test_the_api_says_how_many_devices_of_a_name_the_node_has(
    folder: Path, api: FakeKubeApi, text: str | None, count: int | None
) -> None:
    api.change_node(HERE, {"status": {"allocatable": {"amd.com/gpu": text, "cpu": "8"}}})
    (folder / "amdvgpud.toml").touch()
    settings = read_settings({}, {"kube.config": str(folder / "kubeconfig")}, folder / "amdvgpud.toml")
    assert await _counting(settings, ENVIRONMENT)("amd.com/gpu") == count


async def test_where_the_api_cannot_be_asked_nobody_says_so(folder: Path, api: FakeKubeApi) -> None:
    (folder / "amdvgpud.toml").touch()
    api.nodes.clear()
    for flags in ({"kube.config": str(folder / "kubeconfig")}, {}):
        assert await _counting(read_settings({}, flags, folder / "amdvgpud.toml"), ENVIRONMENT)("amd.com/gpu") is None
