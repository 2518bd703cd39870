"""``amdvgpud kube own-devices``: in a pod with a service account, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from amdvgpud.core.cdi_runtimes import CdiWords
from amdvgpud.core.errors import Invalid
from amdvgpud.kubernetes import offer_own_devices
from amdvgpud.serve.kube.own import RESOURCE
from amdvgpud.settings import read_settings
from tests.daemons import PROGRAM
from tests.kubernetes.conftest import kubelet_options
from tests.serve.kube.kubelet import Kubelet


async def test_it_is_registered_and_the_file_is_written_when_it_is_given(folder: Path, kubelet: Kubelet) -> None:
    (folder / "namespace").write_text("gpu-system\n")
    words = [*kubelet_options(kubelet, "off"), f"--cdi-dir={folder}/cdi", "--kubelet-delivery=cdi"]
    flags = {key.lstrip("-").replace("-", ".", 1).replace("-", "_"): text for key, _, text in map(_split, words)}
    settings = read_settings({}, flags)
    offering = asyncio.create_task(offer_own_devices(settings, {}, lambda *_: CdiWords(), folder))
    try:
        plugin = await kubelet.registered(RESOURCE, within_s=30)
        assert plugin.healthy == ["gpus"]
        (answer,) = await plugin.allocate(["gpus"])
    finally:
        offering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await offering
    assert [device.name for device in answer.cdi_devices] == ["amdvgpu.io/daemon=gpus"]
    document = json.loads((folder / "cdi/amdvgpu.io-daemon.json").read_text())
    assert document["kind"] == RESOURCE


def _split(word: str) -> tuple[str, str, str]:
    return word.partition("=")


async def test_out_of_a_pod_it_says_what_it_is_for(folder: Path, kubelet: Kubelet) -> None:
    with pytest.raises(Invalid, match="this is for a pod with a service account, whose namespace cannot be read"):
        await offer_own_devices(read_settings({}, {}), {}, lambda *_: CdiWords(), folder)
    command = [*PROGRAM, *kubelet_options(kubelet, "off"), "kube", "own-devices"]
    done = await asyncio.to_thread(subprocess.run, command, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("amdvgpud: this is for a pod")
