"""A support bundle of the real daemon, made as an operator makes it, with a secret planted wherever one may be."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable

import pytest

from tests.docs.conftest import Machine

pytestmark = [pytest.mark.root, pytest.mark.podman]

TOKEN = "wTq7vN2pXr9sLk4m"  # noqa: S105 - planted, to be looked for


def test_a_bundle_of_a_running_daemon_has_its_state_and_no_secret(
    reader: Machine, machine: Callable[[str], Machine]
) -> None:
    planted = reader.run(
        "mkdir -p /etc/amdvgpud/conf.d && umask 077 && "
        f"echo {TOKEN} > /etc/amdvgpud/token && echo 'tick_s = 0.3 # {TOKEN}' > /etc/amdvgpud/conf.d/10-tick.toml"
    )
    assert planted.code == 0, planted.output
    node = machine("mi300x,rx9070xt")
    changed = node.run(
        "amdvgpuctl slice create alice --gpu 0 --vram 1GiB && "
        f"curl -sf -H 'Authorization: Bearer {TOKEN}' -H 'Content-Type: application/json' "
        f"""-d '{{"slice": "alice", "holder": "curl --oauth2-bearer {TOKEN}"}}' http://127.0.0.1:9841/v1/leases"""
    )
    assert changed.code == 0, changed.output
    made = node.run("amdvgpuctl support-bundle secret.tar.gz")
    assert made.code == 0, made.output

    with tarfile.open(node.corner.path("/run/reader/secret.tar.gz")) as tar:
        contents = {m.name.removeprefix("amdvgpud-support/"): tar.extractfile(m) for m in tar.getmembers()}
        texts = {name: file.read().decode() for name, file in contents.items() if file is not None}
    assert [name for name, text in texts.items() if TOKEN in text] == []
    assert texts["config/conf.d/10-tick.toml"] == "tick_s = 0.3 # <removed>\n"
    assert json.loads(texts["api/leases.json"])["leases"][0]["holder"] == "curl --oauth2-bearer <removed>"
    assert json.loads(texts["api/slices.json"])["slices"][0]["name"] == "alice"
    assert "slice.created" in texts["api/events.json"]
    assert 'amdvgpu_slice_vram_limit_bytes{slice="alice"' in texts["metrics.txt"]
    assert "gfx_target_version 90402" in texts["machine/sys/class/kfd/kfd/topology/nodes/1/properties"]
