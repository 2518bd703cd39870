"""amdvgpud as a program: which way pods get their slices, by an API server in memory and a runtime's configuration."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import PROGRAM, a_daemon, options_of
from tests.kubernetes.conftest import ENVIRONMENT, kubelet_options
from tests.serve.kube.fake_kubeapi import FakeKubeApi
from tests.serve.kube.kubelet import Kubelet
from tests.serve.kube.stage import HERE

PROFILE = "25c-4g"


def options(folder: Path, kubelet: Kubelet, *more: str) -> list[str]:
    profile = f"--kubelet-profiles={PROFILE}=25%:4GiB"
    return ["--simulate=rx9070xt", profile, *kubelet_options(kubelet, "profiles"), *more]


async def asked(folder: Path, *words: str) -> Any:
    ctl = ("-c", "from amdvgpud.ctl.cli import main; main()", "--socket", f"{folder}/run/api.sock")
    process = await asyncio.create_subprocess_exec(PROGRAM[0], *ctl, *words, stdout=subprocess.PIPE)
    return (await process.communicate())[0].decode()


@pytest.mark.parametrize(("on", "way"), [("true", "cdi"), ("false", "nodes")])
async def test_a_pod_is_told_names_where_kubelet_and_runtime_take_them(
    folder: Path, kubelet: Kubelet, api: FakeKubeApi, on: str, way: str
) -> None:
    software = {"kubeletVersion": "v1.35.4", "containerRuntimeVersion": "containerd://1.7.24"}
    api.nodes[HERE]["status"] = {"nodeInfo": software}
    config = folder / "config.toml"
    config.write_text(f'[plugins.cri]\nenable_cdi = {on}\ncdi_spec_dirs = ["{folder}/cdi"]\n')
    named = (f"--kube-config={folder}/kubeconfig", f"--kubelet-runtime-config={config}")
    with a_daemon(folder, *options(folder, kubelet, *named), env=ENVIRONMENT):
        plugin = await kubelet.registered(f"amdvgpu.io/{PROFILE}", within_s=30)
        (answer,) = await plugin.allocate([f"{PROFILE}-0"])
        system = json.loads(await asked(folder, "status", "-o", "json"))
        shown = await asked(folder, "status")
    assert ([d.name for d in answer.cdi_devices], bool(answer.mounts)) == (
        ([f"amdvgpu.io/slice={PROFILE}-0"], False) if way == "cdi" else ([], True)
    )
    assert system["kubelet"]["delivery"] == way
    assert str(config) in system["kubelet"]["reason"]
    assert f"by {way}: " in shown


async def test_without_an_api_it_is_nodes_and_the_reason_is_said(folder: Path, kubelet: Kubelet) -> None:
    with a_daemon(folder, *options(folder, kubelet)):
        plugin = await kubelet.registered(f"amdvgpu.io/{PROFILE}", within_s=30)
        (answer,) = await plugin.allocate([f"{PROFILE}-0"])
        system = json.loads(await asked(folder, "status", "-o", "json"))
    assert list(answer.cdi_devices) == []
    assert system["kubelet"] == {
        "delivery": "nodes",
        "known": True,
        "reason": "nobody says which versions kubelet and runtime have (kube.config: no kubeconfig is named, and this "
        "process is in no pod with a service account (KUBERNETES_SERVICE_HOST, "
        "/var/run/secrets/kubernetes.io/serviceaccount/token): name a kubeconfig)",
    }


async def test_settings_that_rest_on_the_hook_are_refused_at_the_start_where_it_cannot_come(
    folder: Path, kubelet: Kubelet
) -> None:
    command = [*PROGRAM, *options_of(folder, *options(folder, kubelet, "--hook-required=true"))]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    subprocess.run(["umount", folder / "run" / "slices"], check=False, capture_output=True)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "amdvgpud: kubelet.delivery: 'auto' comes to 'nodes', which brings no hook into pods, and hook.required needs"
    )
    assert kubelet.registrations == []
