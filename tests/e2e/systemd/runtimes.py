"""Other runtimes than root's podman take a slice by its CDI name and run its hook: docker, containerd, rootless podman.

Debian 13's own packages and units, with the daemon's units beside them; simulated GPUs. How it is run: machine.py.
"""

from __future__ import annotations

import json
import os
import pwd
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.systemd.machine import (
    KFDCLIENT,
    Skipped,
    api,
    check,
    ctl,
    cursor,
    drop_in,
    image,
    install,
    journal,
    main,
    main_pid,
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


def configure_docker(more: dict[str, object]) -> None:
    settings = {
        "features": {"cdi": True},
        "cdi-spec-dirs": ["/etc/cdi", "/var/run/cdi"],
        "bridge": "none",
        "iptables": False,
        "ip6tables": False,
        **more,
    }
    Path("/etc/docker").mkdir(exist_ok=True)
    Path("/etc/docker/daemon.json").write_text(json.dumps(settings))
    run("systemctl", "restart", "docker.service")


@contextmanager
def settings(**environment: str) -> Iterator[None]:
    """The daemon, started anew with these and then without them."""
    text = "".join(f"Environment={name}={value}\n" for name, value in environment.items())
    try:
        with drop_in("settings", f"[Service]\n{text}"):
            run("systemctl", "restart", "amdvgpud.service")
            yield
    finally:
        run("systemctl", "reset-failed", "amdvgpud.service", code=None)
        run("systemctl", "restart", "amdvgpud.service")


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
    for unit in ("docker.service", "containerd.service"):
        limits_for_here(unit)
    run("systemctl", "daemon-reload")
    configure_docker({})
    run("docker", "import", "--change", 'CMD ["/usr/bin/sleep", "1000"]', str(image()), IMAGE)
    container = ["docker", "run", "--rm", "--network=none"]
    assert "ENOMEM" not in run(*container, f"--device={DEVICE}", IMAGE, *CLIENT, str(GIB_ALLOWED))
    assert "ENOMEM" in run(*container, f"--device={DEVICE}", IMAGE, *CLIENT, str(GIB_ALLOWED + 1))
    assert '"slice": "alice"' in run(*container, f"--device={DEVICE}", IMAGE, "cat", "/run/amdvgpu/alice/slice.json")
    assert "unresolvable CDI devices" in run(*container, "--device=amdvgpu.io/slice=nobody", IMAGE, "cat", code=125)
    run(*container, IMAGE, *CLIENT, "1", code=3)
    until("nothing in use", lambda: used_bytes("alice") == 0)


def containers(name: str) -> list[dict[str, Any]]:
    """Those that have the slice, as `slice show` gives them."""
    found: list[dict[str, Any]] = json.loads(ctl("slice", "show", name, "-o", "json"))["containers"]
    return found


def lease_for_a_container_of(name: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(ctl("lease", "create", "--slice", name, "--bind", "container", "-o", "json"))
    return made


def known_from_its_start_to_its_end(
    name: str, start: Callable[[], str], pid_of: Callable[[str], int], end: Callable[[str], object], gate: str = "yes"
) -> None:
    """A container that has the slice is told of by its hook, holds slice and lease, and is gone at its end."""
    waiting = lease_for_a_container_of(name)
    assert waiting["pid"] is None, waiting
    identity = start()
    try:
        until("it is told of", lambda: containers(name))
        (one,) = containers(name)
        assert (one["id"], one["reported"], one["gate"]) == (identity, True, gate), one
        assert one["pid"] == pid_of(identity), one
        (cgroup,) = [line for line in Path(f"/proc/{one['pid']}/cgroup").read_text().split() if line.startswith("0::")]
        print(f"    # cgroup {cgroup.removeprefix('0::').replace(identity, '<id>')}", flush=True)
        assert identity in cgroup, cgroup
        assert identity[:12] in ctl("slice", "show", name)
        assert api(f"/v1/leases/{waiting['id']}")["pid"] == one["pid"]
        ctl("lease", "release", waiting["id"])
        refused = ctl("slice", "delete", name, code=1)
        assert f"container {identity[:12]} (pid {one['pid']}) has it" in refused, refused
        assert lease_for_a_container_of(name)["pid"] == one["pid"], "it is the container's at once"
    finally:
        end(identity)
    until("its end", lambda: containers(name) == [])
    until("its lease's end", lambda: api("/v1/leases")["leases"] == [])


DOCKER = ("docker", "run", "--network=none", f"--device={DEVICE}")


def docker_knows() -> None:
    known_from_its_start_to_its_end(
        "alice",
        lambda: run(*DOCKER, "--detach", "--rm", IMAGE).split()[-1],
        lambda identity: int(run("docker", "inspect", "--format={{.State.Pid}}", identity)),
        lambda identity: run("docker", "rm", "--force", identity),
    )


@check
def docker_s_containers_are_known_from_their_start_to_their_end() -> None:
    docker_knows()


@check
def a_container_that_started_while_the_daemon_was_away_is_found() -> None:
    units = ("amdvgpud.socket", "amdvgpud.service")
    run("systemctl", "stop", *units)
    identity = run(*DOCKER, "--detach", "--rm", IMAGE).split()[-1]
    run("systemctl", "start", *units)
    (one,) = containers("alice")
    assert (one["id"], one["reported"]) == (identity, False), one
    run("docker", "rm", "--force", identity)
    until("its end", lambda: containers("alice") == [])


@check
def no_container_starts_while_the_daemon_is_away_where_the_hook_is_required() -> None:
    with settings(AMDVGPUD_HOOK_REQUIRED="true"):
        assert "mounted" in run(*DOCKER, "--rm", IMAGE, "echo", "mounted")
        run("systemctl", "stop", "amdvgpud.socket", "amdvgpud.service")
        refused = run(*DOCKER, "--rm", IMAGE, "echo", "mounted", code=None)
        assert "no daemon answers at /run/amdvgpud/report.sock" in refused, refused
        assert "hook.required" in refused, refused
        assert "mounted" not in refused, refused
        run("systemctl", "start", "amdvgpud.socket", "amdvgpud.service")


@check
def docker_prints_why_an_image_is_refused() -> None:
    with settings(AMDVGPUD_IMAGES_POLICY="refuse"):
        refused = run(*DOCKER, "--rm", IMAGE, "/static", code=None)
        said = "slice alice would not be enforced: /static is a static program, which loads no library"
        assert said in refused, refused
        assert "mounted" in run(*DOCKER, "--rm", IMAGE, "echo", "mounted")
        assert containers("alice") == []


@check
def under_a_policy_that_refuses_a_daemon_that_is_slow_lets_no_container_start() -> None:
    pid = main_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        assert "mounted" in run(*DOCKER, "--rm", IMAGE, "echo", "mounted"), "nothing is at stake"
    finally:
        os.kill(pid, signal.SIGCONT)
    with settings(AMDVGPUD_IMAGES_POLICY="refuse"):
        pid = main_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            refused = run(*DOCKER, "--rm", IMAGE, "echo", "mounted", code=None)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert "did not answer within 5000 ms" in refused, refused
        assert "images.policy" in refused, refused
        assert "mounted" not in refused, refused


@check
def docker_s_containers_are_known_with_its_other_cgroup_driver() -> None:
    configure_docker({"exec-opts": ["native.cgroupdriver=cgroupfs"]})
    docker_knows()


@check
def docker_sees_a_slice_that_was_made_after_its_start() -> None:
    ctl("slice", "create", "late", "--gpu", "1", "--vram", "1GiB", "--compute", "10%")
    container = ["docker", "run", "--rm", "--network=none", "--device=amdvgpu.io/slice=late", IMAGE]
    assert "ENOMEM" in run(*container, *CLIENT, "2")
    until("its end", lambda: containers("late") == [])
    # By force: in nspawn the daemon sees no pid namespace but its own, so it cannot tell that a slot's owner has ended.
    ctl("slice", "delete", "--force", "late")


# ------------------------------------------------------------------------------------------------- over the CRI


CRI_CONFIG = """
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  enable_cdi = true
  sandbox_image = "%(image)s"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = %(systemd)s
      BinaryName = "/usr/local/bin/runc-here"
"""

RUNC_HERE = """#!/usr/bin/python3
import json, os, pathlib, sys
if "--bundle" in sys.argv:
    path = pathlib.Path(sys.argv[sys.argv.index("--bundle") + 1], "config.json")
    config = json.loads(path.read_text())
    config["linux"].pop("resources", None)
    config["process"].pop("oomScoreAdj", None)
    path.write_text(json.dumps(config))
os.execv("/usr/sbin/runc", ["runc", *sys.argv[1:]])
"""
"""Over the CRI shares of a processor and a lower oom_score_adj are always asked for. The cgroup tree of this test bed
has no controllers, and it may not lower that one."""


def runc_here() -> None:
    runc = Path("/usr/local/bin/runc-here")
    runc.write_text(RUNC_HERE)
    runc.chmod(0o755)


def configure_containerd(*, systemd: bool) -> None:
    if not Path("/mnt/crictl").exists():
        raise Skipped("no crictl: Debian has none, and no Go built one")
    Path("/etc/containerd/config.toml").write_text(CRI_CONFIG % {"image": IMAGE, "systemd": str(systemd).lower()})
    runc_here()
    Path("/etc/crictl.yaml").write_text("runtime-endpoint: unix:///run/containerd/containerd.sock\n")
    run("systemctl", "restart", "containerd.service")


@check
def containerd_holds_a_container_of_its_cri_to_its_slice() -> None:
    configure_containerd(systemd=False)
    run("docker", "save", "--output", "/tmp/saved.tar", IMAGE)
    run("ctr", "--namespace=k8s.io", "images", "import", "/tmp/saved.tar")
    assert "ENOMEM" not in cri_written("some", DEVICE, str(GIB_ALLOWED))
    assert "ENOMEM" in cri_written("more", DEVICE, str(GIB_ALLOWED + 1))
    until("nothing in use", lambda: used_bytes("alice") == 0)


@check
def containerd_s_containers_are_known_from_their_start_to_their_end() -> None:
    cri_knows("/cri")


@check
def containerd_s_containers_are_known_with_its_other_cgroup_driver() -> None:
    configure_containerd(systemd=True)
    cri_knows("cri.slice")


@check
def containerd_prints_why_an_image_is_refused() -> None:
    cri_prints_why_an_image_is_refused()


def cri_prints_why_an_image_is_refused() -> None:
    with settings(AMDVGPUD_IMAGES_POLICY="refuse"):
        pod = cri_pod("refused", "cri.slice")
        refused = cri_create(pod, "refused", DEVICE, ["/static"], code=None)  # CRI-O runs the hook here
        if len(refused.split()) == 1:
            refused = crictl("start", refused.strip(), code=None)  # and containerd here
        crictl("rmp", "--force", pod)
        assert "slice alice would not be enforced: /static is a static program" in refused, refused


def cri_knows(parent: str) -> None:
    pod = cri_pod("known", parent)

    def start() -> str:
        made = cri_container(pod, "known", DEVICE, ["/usr/bin/sleep", "1000"])
        crictl("start", made)
        return made

    def end(made: str) -> None:
        crictl("rm", "--force", made)

    known_from_its_start_to_its_end(
        "alice", start, lambda made: int(json.loads(crictl("inspect", made))["info"]["pid"]), end
    )
    crictl("rmp", "--force", pod)


def crictl(*argv: str, code: int | None = 0) -> str:
    return run("/mnt/crictl", *argv, code=code)


HOST_NETWORK = {"security_context": {"namespace_options": {"network": 2}}}


def cri_pod(name: str, parent: str) -> str:
    """A sandbox as a kubelet would make it, in the cgroup ``parent``; its id."""
    pod = {
        "metadata": {"name": name, "namespace": "default", "uid": name, "attempt": 0},
        "log_directory": "/tmp",
        "linux": {**HOST_NETWORK, "cgroup_parent": parent},
    }
    Path(f"/tmp/{name}.pod").write_text(json.dumps(pod))
    return crictl("runp", f"/tmp/{name}.pod").split()[-1]


def cri_container(pod: str, name: str, device: str, command: list[str]) -> str:
    """A container that is made, and not started; its id. It writes to /tmp/<name>.log."""
    return cri_create(pod, name, device, command, code=0).split()[-1]


def cri_create(pod: str, name: str, device: str, command: list[str], code: int | None) -> str:
    container = {
        "metadata": {"name": name},
        "image": {"image": IMAGE},
        "command": command,
        "log_path": f"{name}.log",
        "linux": HOST_NETWORK,
        "CDI_devices": [{"name": device}],
    }
    Path("/tmp/container.json").write_text(json.dumps(container))
    return crictl("create", pod, "/tmp/container.json", f"/tmp/{name}.pod", code=code)


def cri_written(name: str, device: str, count: str, parent: str = "/cri") -> str:
    """What the client of the KFD wrote in a container that a kubelet would have made so."""
    pod = cri_pod(name, parent)
    made = cri_container(pod, name, device, [*CLIENT, count])
    crictl("start", made)
    until("its end", lambda: json.loads(crictl("inspect", made))["status"]["state"] == "CONTAINER_EXITED")
    written = Path(f"/tmp/{name}.log").read_text()
    crictl("rmp", "--force", pod)
    return written


CRIO_CONFIG = """
[crio]
  root = "/var/lib/containers/crio"
  runroot = "/run/containers/crio"
  storage_driver = "overlay"
[crio.runtime]
  default_runtime = "runc"
  cgroup_manager = "%(manager)s"
  conmon_cgroup = "%(monitor)s"
  pinns_path = "/mnt/pinns"
  [crio.runtime.runtimes.runc]
    runtime_path = "/usr/local/bin/runc-here"
    monitor_path = "/usr/bin/conmon"
[crio.image]
  pause_image = "%(image)s"
  pause_command = "/static"
"""


def configure_crio(manager: str, monitor: str) -> None:
    if not Path("/mnt/crio").exists() or not Path("/mnt/crictl").exists():
        raise Skipped("no CRI-O: Debian has none; tests/e2e/systemd/crio builds it with Go")
    runc_here()
    Path("/etc/crio").mkdir(exist_ok=True)
    Path("/etc/crio/crio.conf").write_text(CRIO_CONFIG % {"image": IMAGE, "manager": manager, "monitor": monitor})
    Path("/etc/crictl.yaml").write_text("runtime-endpoint: unix:///run/crio/crio.sock\ntimeout: 60\n")
    Path("/etc/systemd/system/crio.service").write_text("[Service]\nExecStart=/mnt/crio\nKillMode=process\n")
    run("systemctl", "daemon-reload")
    run("systemctl", "restart", "crio.service")
    until("CRI-O answers", lambda: "RuntimeName" in crictl("version", code=None))


@check
def cri_o_s_containers_are_known_from_their_start_to_their_end() -> None:
    configure_crio("systemd", "system.slice")
    stores = ("--root=/var/lib/containers/crio", "--runroot=/run/containers/crio")
    run("podman", *stores, "import", str(image()), IMAGE)
    cri_knows("cri.slice")


@check
def cri_o_s_containers_are_known_with_its_other_cgroup_driver() -> None:
    configure_crio("cgroupfs", "pod")
    cri_knows("/cri")


@check
def cri_o_holds_a_container_to_its_slice_and_prints_why_an_image_is_refused() -> None:
    configure_crio("systemd", "system.slice")
    assert "ENOMEM" not in cri_written("less", DEVICE, str(GIB_ALLOWED), "cri.slice")
    assert "ENOMEM" in cri_written("over", DEVICE, str(GIB_ALLOWED + 1), "cri.slice")
    cri_prints_why_an_image_is_refused()


# ------------------------------------------------------------------------------------------------- without root


@dataclass(frozen=True)
class User:
    name: str
    uid: int

    @staticmethod
    def known(name: str) -> User:
        return User(name, pwd.getpwnam(name).pw_uid)

    def can(self, *argv: str) -> list[str]:
        """The command as this user runs it, under the user's own systemd."""
        self_ = ("setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--init-groups")
        runtime = f"/run/user/{self.uid}"
        environment = ("env", f"XDG_RUNTIME_DIR={runtime}", f"DBUS_SESSION_BUS_ADDRESS=unix:path={runtime}/bus")
        return [*self_, *environment, "systemd-run", "--user", "-qPG", "--wait", "-pKillMode=process", "--", *argv]

    def podman(self, *argv: str) -> list[str]:
        own = f"/var/lib/containers/{self.name}"
        return self.can("podman", f"--root={own}", "--events-backend=file", *argv)


def user(name: str) -> User:
    run("useradd", "--create-home", name)
    uid = pwd.getpwnam(name).pw_uid
    store = Path(f"/var/lib/containers/{name}")
    store.mkdir()
    os.chown(store, uid, uid)
    run("systemctl", "start", f"user@{uid}.service")
    return User.known(name)


ROOTLESS = ("--network=none", "--pids-limit=0", "--group-add=keep-groups", "--device=amdvgpu.io/slice=hers")


@check
def podman_without_root_holds_its_owner_s_container_to_the_slice() -> None:
    carol = user("carol")
    ctl("slice", "create", "hers", "--owner", str(carol.uid), "--gpu", "1", "--vram", "2GiB", "--compute", "10%")
    # A container without masks on /proc and /sys must be seen for a user namespace to mount its own.
    for kind in ("proc", "sysfs"):
        Path(f"/run/whole-{kind}").mkdir()
        run("mount", "-t", kind, kind, f"/run/whole-{kind}")
    tar = image()
    tar.chmod(0o644)
    run(*carol.podman("import", str(tar), IMAGE))
    container = carol.podman("run", "--rm", *ROOTLESS, IMAGE)
    assert "ENOMEM" not in run(*container, *CLIENT, "2")
    assert "ENOMEM" in run(*container, *CLIENT, "3")
    until("nothing in use", lambda: used_bytes("hers") == 0)
    # Another one's slice cannot be mounted: its directory lets nobody else pass.
    hers = [option for option in ROOTLESS if not option.startswith("--device")]
    refused = run(*carol.podman("run", "--rm", *hers, f"--device={DEVICE}", IMAGE, *CLIENT, "1"), code=None)
    assert "ermission denied" in refused, refused


@check
def a_rootless_container_is_known_from_its_start_to_its_end() -> None:
    carol = User.known("carol")
    known_from_its_start_to_its_end(
        "hers",
        lambda: run(*carol.podman("run", "--detach", "--rm", *ROOTLESS, IMAGE, "/usr/bin/sleep", "1000")).split()[-1],
        lambda identity: int(run(*carol.podman("inspect", "--format={{.State.Pid}}", identity))),
        lambda identity: run(*carol.podman("rm", "--force", "--time=0", identity)),
        gate="unknown",  # only root's word is followed into file systems
    )


@check
def a_report_is_believed_by_whose_the_process_is_and_by_its_mounts_and_cgroup_only() -> None:
    carol, mallory = User.known("carol"), user("mallory")
    identity = run(*carol.podman("run", "--detach", "--rm", *ROOTLESS, IMAGE, "/usr/bin/sleep", "1000")).split()[-1]
    until("it is told of", lambda: containers("hers"))
    before = containers("hers")
    for liar, name, said, why in (
        (mallory, "hers", identity, f"is not uid {mallory.uid}'s"),
        (carol, "alice", identity, "does not have slice alice mounted"),
        (carol, "hers", "f" * 64, f"is in the cgroup of container {identity}"),
    ):
        at = cursor()
        state = {"ociVersion": "1.0.2", "id": said, "pid": before[0]["pid"], "bundle": "/b", "status": "created"}
        Path("/tmp/state").write_text(json.dumps(state))
        run(*liar.can("sh", "-c", f"/usr/lib/amdvgpu/amdvgpu-hook start {name} --require --wait 20000 </tmp/state"))
        heard = journal(at)
        assert "not believed" in heard, heard
        assert why in heard, heard
    assert (containers("hers"), containers("alice")) == (before, [])
    run(*carol.podman("rm", "--force", "--time=0", identity))
    until("its end", lambda: containers("hers") == [])


if __name__ == "__main__":
    sys.exit(main())
