"""Other runtimes than root's podman take a slice by its CDI name: docker, containerd over CRI, podman without root.

Debian 13's own packages and units, with the daemon's units beside them; simulated GPUs. How it is run: machine.py.
"""

from __future__ import annotations

import json
import os
import pwd
import sys
from pathlib import Path

from tests.e2e.systemd.machine import (
    KFDCLIENT,
    Skipped,
    check,
    ctl,
    image,
    install,
    main,
    run,
    simulate,
    until,
    used_bytes,
)

GIB_ALLOWED = 4
IMAGE = "localhost/glibc:1"
CLIENT = (KFDCLIENT, "--step", "1G", "--free", "--count")
DEVICE = "amdvgpu.io/slice=alice"


def limits_for_here(unit: str) -> None:
    """The units ask for more files than a container of this test bed may: for as many as there are."""
    folder = Path(f"/etc/systemd/system/{unit}.d")
    folder.mkdir()
    (folder / "limits.conf").write_text("[Service]\nLimitNOFILE=1024:16384\nLimitNPROC=\nLimitCORE=\n")


@check
def the_daemon_serves_a_slice() -> None:
    install()
    simulate("2*mi300x")
    ctl("slice", "create", "alice", "--gpu", "0", "--vram", f"{GIB_ALLOWED}GiB", "--compute", "25%")


@check
def doctor_says_of_each_runtime_whether_it_would_take_the_file() -> None:
    said = ctl("doctor", code=None)
    for runtime in ("podman", "docker", "containerd"):
        assert f" {runtime} " in said, said
    assert "would resolve amdvgpu.io/slice=" in said, said
    print(
        *(f"    # {line}" for line in said.splitlines() if any(r in line for r in ("podman", "docker", "cont"))),
        sep="\n",
    )


@check
def docker_holds_a_container_to_its_slice() -> None:
    settings = {
        "features": {"cdi": True},
        "cdi-spec-dirs": ["/etc/cdi", "/var/run/cdi"],
        "bridge": "none",
        "iptables": False,
        "ip6tables": False,
    }
    Path("/etc/docker").mkdir(exist_ok=True)
    Path("/etc/docker/daemon.json").write_text(json.dumps(settings))
    for unit in ("docker.service", "containerd.service"):
        limits_for_here(unit)
    run("systemctl", "daemon-reload")
    run("systemctl", "restart", "docker.service")
    run("docker", "import", "--change", 'CMD ["/usr/bin/sleep", "1000"]', str(image()), IMAGE)
    container = ["docker", "run", "--rm", "--network=none"]
    assert "ENOMEM" not in run(*container, f"--device={DEVICE}", IMAGE, *CLIENT, str(GIB_ALLOWED))
    assert "ENOMEM" in run(*container, f"--device={DEVICE}", IMAGE, *CLIENT, str(GIB_ALLOWED + 1))
    assert '"slice": "alice"' in run(*container, f"--device={DEVICE}", IMAGE, "cat", "/run/amdvgpu/alice/slice.json")
    assert "unresolvable CDI devices" in run(*container, "--device=amdvgpu.io/slice=nobody", IMAGE, "cat", code=125)
    run(*container, IMAGE, *CLIENT, "1", code=3)
    until("nothing in use", lambda: used_bytes("alice") == 0)


@check
def docker_sees_a_slice_that_was_made_after_its_start() -> None:
    ctl("slice", "create", "late", "--gpu", "1", "--vram", "1GiB", "--compute", "10%")
    container = ["docker", "run", "--rm", "--network=none", "--device=amdvgpu.io/slice=late", IMAGE]
    assert "ENOMEM" in run(*container, *CLIENT, "2")
    ctl(
        "slice", "delete", "--force", "late"
    )  # in nspawn the daemon cannot tell that a process of a container has ended


@check
def containerd_holds_a_container_of_its_cri_to_its_slice() -> None:
    if not Path("/mnt/crictl").exists():
        raise Skipped("no crictl: Debian has none, and no Go built one")
    config = f"""
        version = 2
        [plugins."io.containerd.grpc.v1.cri"]
          enable_cdi = true
          sandbox_image = "{IMAGE}"
          restrict_oom_score_adj = true
          disable_cgroup = true
    """
    Path("/etc/containerd/config.toml").write_text(config)
    Path("/etc/crictl.yaml").write_text("runtime-endpoint: unix:///run/containerd/containerd.sock\n")
    run("systemctl", "restart", "containerd.service")
    run("docker", "save", "--output", "/tmp/saved.tar", IMAGE)
    run("ctr", "--namespace=k8s.io", "images", "import", "/tmp/saved.tar")
    assert "ENOMEM" not in cri("some", DEVICE, str(GIB_ALLOWED))
    assert "ENOMEM" in cri("more", DEVICE, str(GIB_ALLOWED + 1))
    until("nothing in use", lambda: used_bytes("alice") == 0)


def cri(name: str, device: str, count: str) -> str:
    """What the client of the KFD wrote in a container that a kubelet would have made so."""
    crictl = ["/mnt/crictl"]
    host = {"security_context": {"namespace_options": {"network": 2}}}
    pod = {
        "metadata": {"name": name, "namespace": "default", "uid": name, "attempt": 0},
        "log_directory": "/tmp",
        "linux": {**host, "cgroup_parent": "/cri"},
    }
    container = {
        "metadata": {"name": name},
        "image": {"image": IMAGE},
        "command": [*CLIENT, count],
        "log_path": f"{name}.log",
        "linux": host,
        "CDI_devices": [{"name": device}],
    }
    Path("/tmp/pod.json").write_text(json.dumps(pod))
    Path("/tmp/container.json").write_text(json.dumps(container))
    pod_id = run(*crictl, "runp", "/tmp/pod.json").split()[-1]
    made = run(*crictl, "create", pod_id, "/tmp/container.json", "/tmp/pod.json").split()[-1]
    run(*crictl, "start", made)

    def ended() -> bool:
        state: str = json.loads(run(*crictl, "inspect", made))["status"]["state"]
        return state == "CONTAINER_EXITED"

    until("its end", ended)
    written = Path(f"/tmp/{name}.log").read_text()
    run(*crictl, "rmp", "--force", pod_id)
    return written


@check
def podman_without_root_holds_its_owner_s_container_to_the_slice() -> None:
    run("useradd", "--create-home", "carol")
    uid = pwd.getpwnam("carol").pw_uid
    ctl("slice", "create", "hers", "--owner", str(uid), "--gpu", "1", "--vram", "2GiB", "--compute", "10%")
    # A container without masks on /proc and /sys must be seen for a user namespace to mount its own.
    for kind in ("proc", "sysfs"):
        Path(f"/run/whole-{kind}").mkdir()
        run("mount", "-t", kind, kind, f"/run/whole-{kind}")
    runtime = Path(f"/run/user/{uid}")
    runtime.mkdir(parents=True)
    store = Path("/var/lib/containers/carol")
    store.mkdir()
    for path in (runtime, store):
        os.chown(path, uid, uid)
    tar = image()
    tar.chmod(0o644)
    podman = [
        *("setpriv", f"--reuid={uid}", f"--regid={uid}", "--init-groups"),
        *("env", "-C", "/", f"HOME={pwd.getpwnam('carol').pw_dir}", f"XDG_RUNTIME_DIR={runtime}"),
        *("podman", f"--root={store}", "--cgroup-manager=cgroupfs", "--events-backend=file"),
    ]
    run(*podman, "import", str(tar), IMAGE)
    options = ["--rm", "--network=none", "--cgroups=disabled", "--group-add=keep-groups"]
    container = [*podman, "run", *options, "--device=amdvgpu.io/slice=hers", IMAGE]
    assert "ENOMEM" not in run(*container, *CLIENT, "2")
    assert "ENOMEM" in run(*container, *CLIENT, "3")
    until("nothing in use", lambda: used_bytes("hers") == 0)
    # Another one's slice cannot be mounted: its directory lets nobody else pass.
    refused = run(*podman, "run", *options, f"--device={DEVICE}", IMAGE, *CLIENT, "1", code=None)
    assert "ermission denied" in refused, refused


if __name__ == "__main__":
    sys.exit(main())
