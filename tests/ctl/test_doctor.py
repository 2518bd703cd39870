"""amdvgpuctl doctor and support-bundle: verdicts on machines that do not exist, and a bundle that holds no secret."""

from __future__ import annotations

import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from amdvgpud.core import wire
from amdvgpud.ctl import bundle
from amdvgpud.ctl.client import Client
from amdvgpud.ctl.doctor import (
    Daemon,
    DeviceNode,
    Finding,
    Image,
    Probe,
    Runtime,
    ask_daemon,
    findings,
    read_probe,
)
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree
from tests.ctl.stand_ins import Ctl, FakeDaemon, slice_view

TOKEN = "b3f9d1c07a5e4e21"  # noqa: S105 - planted, to be looked for


def system_view(**changed: object) -> wire.SystemView:
    plain = wire.SystemView(
        version="0.1.0",
        api="v1",
        features=[],
        simulated=None,
        driver_version=None,
        generation_id=1,
        revision=1,
        ready=True,
        warnings=[],
        config={"rest.token_file": "/etc/amdvgpud/token", "sysfs_root": "/"},
    )
    return msgspec.structs.replace(plain, **changed)


def cdi_view(**changed: object) -> wire.CdiView:
    plain = wire.CdiView(
        kind="amdvgpu.io/slice",
        path="/run/cdi/amdvgpu.io-slice.json",
        written=True,
        error=None,
        devices=["amdvgpu.io/slice=alice"],
        conflicts=[],
        spec={"cdiVersion": "0.3.0"},
    )
    return msgspec.structs.replace(plain, **changed)


NO_NAMES = wire.KubeletView("nodes", "CDI is off", True)
HEALTHY = Probe(daemon=Daemon(system=system_view(), cdi=cdi_view()))


def lacking(probe: Probe) -> list[Finding]:
    """What is not well, notes too."""
    return [f for f in findings(probe) if f.state != "ok"]


def test_a_healthy_machine_lacks_nothing() -> None:
    assert lacking(HEALTHY) == []
    assert [f.subject for f in findings(HEALTHY)] == [
        "GPUs",
        "driver",
        "/dev/kfd",
        "/dev/dri/renderD128",
        "kernel",
        "cgroups",
        "gate",
        "daemon",
        "podman 5.4.2",
    ]


def node(mode: int = 0o660, usable: bool = True, group: tuple[int, str] = (105, "render")) -> DeviceNode:
    return DeviceNode("/dev/kfd", mode, group, usable)


USER = replace(HEALTHY, uid=1000, groups=frozenset({1000}))


@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        (replace(HEALTHY, gpus=()), ("GPUs", "missing", "no AMD GPU on the PCI bus", "amdvgpud --simulate mi300x")),
        (replace(HEALTHY, driver_loaded=False), ("driver", "missing", "amdgpu is not loaded", "modprobe amdgpu")),
        (replace(HEALTHY, kfd=None), ("/dev/kfd", "missing", "there is no /dev/kfd", "CONFIG_HSA_AMD")),
        (replace(HEALTHY, render_nodes=()), ("render nodes", "missing", "no /dev/dri/renderD*", "dmesg")),
        (
            replace(USER, kfd=node(usable=False)),
            ("/dev/kfd", "missing", "user 1000 is not in group render (105)", "usermod -aG render USER"),
        ),
        (
            replace(USER, kfd=node(usable=False, group=(993, "993"))),
            ("/dev/kfd", "missing", "not in group 993 (993)", "usermod -aG 993 USER"),
        ),
        (
            replace(USER, groups=frozenset({105}), kfd=node()),
            ("/dev/kfd", "note", "a rootless container loses group render", "podman run --group-add keep-groups"),
        ),
        (replace(USER, kfd=node(mode=0o600, usable=False)), ("/dev/kfd", "missing", "mode 0600", "nobody but its")),
        (
            replace(HEALTHY, kfd=node(usable=False)),
            ("/dev/kfd", "missing", "access is refused: a device cgroup", "hand the device in"),
        ),
        (
            replace(HEALTHY, selinux_enforces=True, container_use_devices=False),
            ("SELinux", "missing", "keeps containers from devices", "setsebool -P container_use_devices on"),
        ),
        (
            replace(HEALTHY, kernel="5.15.0-91-generic", gfx_majors=frozenset({12})),
            ("kernel", "missing", "splits WGPs", "a kernel of 6.0 or later"),
        ),
        (
            replace(HEALTHY, kernel="5.15.0-91-generic", gfx_majors=frozenset({11}), driver_version="6.10.5"),
            ("kernel", "note", "before 6.0", ""),
        ),
        (replace(HEALTHY, dmem=False), ("cgroups", "note", "without the dmem controller", "CONFIG_CGROUP_DMEM")),
        (replace(HEALTHY, cgroups="v1"), ("cgroups", "note", "version 2 is not mounted", "unified_cgroup_hierarchy=1")),
        (
            replace(HEALTHY, gate="", gate_trouble="the gate is not installed"),
            ("gate", "missing", "not installed", "libamdvgpu"),
        ),
        (
            replace(HEALTHY, daemon=Daemon("no daemon answers at /x")),
            ("daemon", "missing", "no daemon answers at /x", "systemctl start amdvgpud"),
        ),
        (
            replace(HEALTHY, daemon=Daemon("permission denied", forbidden=True)),
            ("daemon", "missing", "may not use its socket", "usermod -aG amdvgpu USER"),
        ),
        (
            replace(HEALTHY, daemon=Daemon(system=system_view(ready=False), cdi=cdi_view())),
            ("daemon", "missing", "not finished its first look", "wait"),
        ),
        (
            replace(HEALTHY, daemon=Daemon(system=system_view(kubelet=NO_NAMES), cdi=cdi_view())),
            (
                "kubelet",
                "note",
                "pods get slices by device nodes and without the hook: CDI is off",
                "switch CDI on in the runtime; where it is on: kubelet.delivery = 'cdi'",
            ),
        ),
        (
            replace(HEALTHY, daemon=Daemon(system=system_view(warnings=["the state is odd"]), cdi=cdi_view())),
            ("daemon", "note", "the state is odd", ""),
        ),
        (
            replace(HEALTHY, daemon=Daemon(system=system_view(), cdi=cdi_view(), lost=(("alice", "its GPU is gone"),))),
            ("slice alice", "missing", "lost: its GPU is gone", "slice delete alice"),
        ),
        (
            replace(HEALTHY, daemon=Daemon(system=system_view(), cdi=cdi_view(), unusable=(("0000:05:00.0", "vfio"),))),
            ("0000:05:00.0", "note", "cannot be cut: vfio", ""),
        ),
        (
            replace(HEALTHY, daemon=Daemon(system=system_view(), cdi=cdi_view(error="read-only file system"))),
            ("CDI file", "missing", "was not written: read-only", "ReadWritePaths="),
        ),
        (
            replace(HEALTHY, daemon=Daemon(system=system_view(), cdi=cdi_view(conflicts=["/run/cdi/x.json"]))),
            ("CDI file", "missing", "the same names: /run/cdi/x.json", "remove"),
        ),
        (
            replace(USER, user_namespaces=False),
            ("run", "note", "user namespaces are restricted", "user.max_user_namespaces=16384"),
        ),
        (replace(USER, guest_root=False), ("run", "note", "/run/amdvgpu is not there", "mkdir /run/amdvgpu")),
        (
            replace(HEALTHY, writable=(("alice", 4711),)),
            ("slice alice", "missing", "process 4711 has it mounted writable", "mount its guest directory read-only"),
        ),
        (replace(HEALTHY, runtimes=()), ("runtimes", "note", "no container runtime here", "apt install podman")),
    ],
)
def test_each_lack_is_told_alone_and_with_its_cure(probe: Probe, expected: tuple[str, str, str, str]) -> None:
    (found,) = lacking(probe)
    subject, state, text, cure = expected
    assert (found.subject, found.state) == (subject, state)
    assert text in found.text
    assert cure in f"{found.cure} {found.text}"


def test_root_makes_its_mounts_by_itself() -> None:
    assert lacking(replace(HEALTHY, user_namespaces=False, guest_root=False)) == []


def test_old_kernels_are_no_trouble_for_gpus_without_wgps() -> None:
    assert lacking(replace(HEALTHY, kernel="5.15.0", gfx_majors=frozenset({9}))) == []


@pytest.mark.parametrize(
    ("runtime", "version_of_file", "directory", "expected"),
    [
        (Runtime("podman", "4.3.1"), "0.5.0", "/run/cdi", ("ok", "would resolve", "")),
        (Runtime("podman", "4.3.1"), "0.6.0", "/run/cdi", ("missing", "accepts CDI files up to 0.5.0", "newer podman")),
        (Runtime("podman", "3.4.4"), "0.3.0", "/run/cdi", ("missing", "podman 3.4.4 has no CDI", "a newer podman")),
        (Runtime("podman", "4.3.1"), "0.5.0", "/srv/cdi", ("missing", "reads /etc/cdi", "set cdi.dir to /run/cdi")),
        (Runtime("docker", "26.1.5"), "0.5.0", "/run/cdi", ("missing", "switched off", "/etc/docker/daemon.json")),
        (Runtime("docker", "26.1.5", switched_on=True), "0.5.0", "/run/cdi", ("ok", "would resolve", "")),
        (
            Runtime("docker", "28.2.2", dirs=("/etc/cdi",)),
            "0.5.0",
            "/run/cdi",
            ("missing", "looks for CDI files in /etc/cdi only", 'put /run/cdi among "cdi-spec-dirs"'),
        ),
        (Runtime("docker", "28.2.2", dirs=("/etc/cdi", "/var/run/cdi/")), "0.5.0", "/run/cdi", ("ok", "resolve", "")),
        (Runtime("containerd", "v1.7.24"), "0.5.0", "/run/cdi", ("missing", "switched off", "enable_cdi = true")),
        (Runtime("containerd", "v2.1.9"), "0.5.0", "/run/cdi", ("ok", "would resolve", "")),
        (
            Runtime("cri-o", "1.33.0", dirs=("/etc/cdi",)),
            "0.5.0",
            "/run/cdi",
            ("missing", "looks for CDI files in /etc/cdi only", "crio.runtime"),
        ),
        (Runtime("docker", ""), "0.5.0", "/run/cdi", ("note", "does not say its version", "")),
    ],
)  # fmt: skip
def test_each_runtime_is_judged_by_version_switch_and_directories(
    runtime: Runtime, version_of_file: str, directory: str, expected: tuple[str, str, str]
) -> None:
    cdi = cdi_view(path=f"{directory}/amdvgpu.io-slice.json", spec={"cdiVersion": version_of_file})
    probe = replace(HEALTHY, runtimes=(runtime,), daemon=Daemon(system=system_view(), cdi=cdi))
    found = list(findings(probe))[-1]
    state, text, cure = expected
    assert found.state == state
    assert text in found.text
    assert cure in found.cure


@pytest.mark.parametrize(
    ("loaders", "preload", "expected"),
    [
        (("ld-linux-x86-64.so.2",), (), [("ok", "has glibc (ld-linux-x86-64.so.2)")]),
        (("ld-musl-x86_64.so.1",), (), [("missing", "has musl")]),
        (("ld-linux-x86-64.so.2", "ld-musl-x86_64.so.1"), (), [("ok", "has glibc")]),
        (("ld-linux-aarch64.so.1",), (), [("missing", "is for another architecture")]),
        ((), (), [("missing", "has no dynamic loader")]),
        (
            ("ld-linux-x86-64.so.2",),
            ("/usr/lib/libjemalloc.so",),
            [("ok", "has glibc"), ("note", "of its own (/usr/lib/libjemalloc.so), which ours hides")],
        ),
    ],
)
def test_an_image_is_judged_by_its_loaders(
    loaders: tuple[str, ...], preload: tuple[str, ...], expected: list[tuple[str, str]]
) -> None:
    probe = replace(HEALTHY, image=Image("/image", loaders, preload, "x86_64"))
    found = [f for f in findings(probe) if f.subject == "/image"]
    assert [f.state for f in found] == [state for state, _ in expected]
    assert all(text in f.text for f, (_, text) in zip(found, expected, strict=True))


def test_what_the_hardware_lacks_is_a_note_where_the_daemon_simulates() -> None:
    daemon = Daemon(system=system_view(simulated="mi300x"), cdi=cdi_view())
    found = lacking(replace(HEALTHY, gpus=(), driver_loaded=False, daemon=daemon))
    assert [(f.subject, f.state) for f in found] == [("GPUs", "note"), ("driver", "note")]


def test_a_machine_is_read_from_its_files(tmp_path: Path) -> None:
    build_tree(parse_simulation("mi300x,rx9070xt"), tmp_path)
    for path, text in {
        "etc/docker/daemon.json": '{"features": {"cdi": true}, "cdi-spec-dirs": ["/etc/cdi"]}',
        "etc/containerd/config.toml": '[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = true\n',
        "etc/crio/crio.conf.d/10.conf": '[crio.runtime]\ncdi_spec_dirs = ["/srv/cdi"]\n',
        "sys/fs/cgroup/cgroup.controllers": "cpu memory dmem\n",
        "sys/fs/cgroup/dmem.capacity": "drm/0000:03:00.0/vram 17179869184\n",
        "sys/fs/selinux/enforce": "1",
        "sys/fs/selinux/booleans/container_use_devices": "1 0",
        "sys/module/amdgpu/version": "6.10.5\n",
        "image/usr/lib64/ld-linux-x86-64.so.2": "",
        "image/etc/ld.so.preload": "/usr/lib/a.so\n\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "image/lib64").symlink_to("/usr/lib64")
    runtimes = [("docker", "28.2.2"), ("containerd", "1.7.24"), ("cri-o", "1.33.0"), ("podman", "5.4.2")]
    probe = read_probe(Daemon("none"), runtimes, root=tmp_path, image_root=tmp_path / "image")
    assert probe.runtimes == (
        Runtime("docker", "28.2.2", True, ("/etc/cdi",)),
        Runtime("containerd", "1.7.24", True),
        Runtime("cri-o", "1.33.0", dirs=("/srv/cdi",)),
        Runtime("podman", "5.4.2"),
    )
    assert (probe.cgroups, probe.dmem, probe.selinux_enforces, probe.container_use_devices) == ("v2", True, True, True)
    assert (probe.driver_loaded, probe.driver_version, probe.gfx_majors) == (True, "6.10.5", frozenset({9, 12}))
    assert len(probe.gpus) == 2
    assert probe.kfd is not None
    assert (probe.kfd.path, probe.kfd.usable) == ("/dev/kfd", True)
    assert "/dev/dri/renderD128" in [n.path for n in probe.render_nodes]
    assert probe.image == Image(
        str(tmp_path / "image"), ("ld-linux-x86-64.so.2",), ("/usr/lib/a.so",), os.uname().machine
    )


@pytest.mark.parametrize("switch", ["kernel/apparmor_restrict_unprivileged_userns", "user/max_user_namespaces"])
def test_each_switch_of_user_namespaces_is_read(tmp_path: Path, switch: str) -> None:
    file = tmp_path / "proc/sys" / switch
    file.parent.mkdir(parents=True)
    file.write_text("1\n")
    by_one = read_probe(Daemon("none"), [], root=tmp_path).user_namespaces
    file.write_text("0\n")
    by_none = read_probe(Daemon("none"), [], root=tmp_path).user_namespaces
    assert (by_one, by_none) == ((False, True) if "restrict" in switch else (True, False))


@pytest.mark.fixtures
def test_every_captured_machine_is_judged_without_an_error(captures: Path) -> None:
    trees = sorted({path.parent for path in captures.glob("**/sys") if path.is_dir()})
    assert trees
    for tree in trees:
        probe = read_probe(Daemon("none"), [("podman", "5.4.2")], root=tree)
        assert {f.subject for f in findings(probe)} >= {"GPUs", "driver", "kernel", "daemon"}, tree


def test_a_slice_that_is_mounted_writable_is_found_in_who_has_it(tmp_path: Path) -> None:
    mounts = {
        7: "1 2 0:30 /slices/alice/guest /run/amdvgpu/alice ro,nosuid shared:1 - tmpfs tmpfs rw,size=1k",
        8: "1 2 0:30 /slices/bob/guest /run/amdvgpu/bob rw,nosuid - tmpfs tmpfs rw\n"
        "1 2 0:30 /slices/alice/guest/ledger /run/amdvgpu/alice/ledger rw - tmpfs tmpfs rw",
        9: "1 2 0:30 / /run/amdvgpu/carol rw - tmpfs tmpfs ro\nnonsense",
        10: "1 2 0:30 /slices/bob/guest /run/amdvgpu/bob rw,nosuid - tmpfs tmpfs rw",
    }
    for pid, text in mounts.items():
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/mountinfo").write_text(text)
    assert read_probe(Daemon("none"), [], root=tmp_path).writable == (("bob", 8),)


def test_an_empty_machine_is_read_without_an_error(tmp_path: Path) -> None:
    probe = read_probe(Daemon("none"), [("docker", "28.2.2")], root=tmp_path)
    assert (probe.gpus, probe.kfd, probe.render_nodes, probe.cgroups) == ((), None, (), "none")
    assert {f.subject for f in findings(probe) if f.state == "missing"} >= {"GPUs", "driver", "daemon"}


# --------------------------------------------------------------------------------------------------- as commands


@pytest.fixture
def served(daemon: FakeDaemon) -> FakeDaemon:
    daemon.says("GET", "/v1/system", system_view(simulated="mi300x"))
    daemon.says("GET", "/v1/cdi", cdi_view())
    daemon.says("GET", "/v1/gpus", wire.GpuList(gpus=[], unusable=[], revision=1))
    daemon.says("GET", "/v1/slices", wire.SliceList(slices=[slice_view()], revision=1))
    daemon.says("GET", "/v1/slices?state=lost", wire.SliceList(slices=[], revision=1))
    daemon.says("GET", "/v1/leases", wire.LeaseList(leases=[], revision=1))
    daemon.says("GET", "/v1/events?since=0", wire.EventList(events=[], last_id=0, resync=False))
    daemon.says("GET", "/metrics", b"amdvgpu_ready 1\n")
    return daemon


def test_the_daemon_is_asked_for_what_is_judged(served: FakeDaemon) -> None:
    asked = ask_daemon(Client(served.socket))
    assert asked == Daemon(system=system_view(simulated="mi300x"), cdi=cdi_view())
    assert ask_daemon(Client("/nonexistent/api.sock")).trouble.startswith("no daemon answers at /nonexistent")


def test_the_exit_code_says_whether_something_is_missing(ctl: Ctl, served: FakeDaemon) -> None:
    told = ctl("doctor", "-o", "json")
    said = json.loads(told.output)
    assert said["ok"] == all(f["state"] != "missing" for f in said["findings"])
    assert told.exit_code == (0 if said["ok"] else 1)
    served.says("GET", "/v1/system", system_view(ready=False))
    told = ctl("doctor")
    assert told.exit_code == 1
    assert "missing  daemon: version 0.1.0: has not finished its first look at the machine\n" in told.output
    assert "\n         cure: wait for it\n" in told.output


def test_an_image_can_be_looked_at(ctl: Ctl, served: FakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/ld-musl-x86_64.so.1").touch()
    told = ctl("doctor", "--image-root", str(tmp_path))
    assert told.exit_code == 1
    assert f"missing  {tmp_path}: has musl" in told.output


@pytest.fixture
def secretive(tmp_path: Path, served: FakeDaemon) -> Path:
    """A machine whose token has got everywhere it might."""
    for path, text in {
        "etc/amdvgpud/token": TOKEN + "\n",
        "etc/amdvgpud/amdvgpud.toml": f'tick_s = 3\n# token = "{TOKEN}"\n[rest]\ntoken_file = "/etc/amdvgpud/token"\n',
        "etc/amdvgpud/conf.d/10-site.toml": 'password = "correct horse"\n[hub]\nurl = "https://me:hunter22@hub/x"\n',
        "etc/amdvgpud/conf.d/20-broken.toml": 'secret = """\nmultiline-secret\n',
        "sys/module/amdgpu/version": "6.10.5\n",
        "proc/cmdline": "quiet luks.password=letmein42\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    lease = wire.LeaseView(
        id="l1",
        slice="alice",
        holder=f"curl -H 'Authorization: Bearer {TOKEN}'",
        pid=1,
        created_s=0.0,
        expires_s=None,
        ephemeral=False,
        slice_dir="/x",
        environment={"WANDB_API_KEY": "wandb-9876"},
    )
    served.says("GET", "/v1/leases", wire.LeaseList(leases=[lease], revision=1))
    served.says("GET", "/v1/system", system_view())
    served.says("GET", "/metrics", f'amdvgpu_slice_info{{owner="{TOKEN}"}} 1\n'.encode())
    return tmp_path


def test_no_planted_secret_is_in_the_bundle(served: FakeDaemon, secretive: Path) -> None:
    environment = {"WANDB_API_KEY": "wandb-9876", "HOME": "/root"}
    doctor = [Finding("daemon", "note", f"a token was seen: {TOKEN}")]
    contents = bundle.members(Client(served.socket), doctor, root=secretive, environment=environment)
    everything = b"".join(contents.values()).decode()
    for secret in (TOKEN, "correct horse", "hunter22", "multiline-secret", "letmein42", "wandb-9876"):
        assert secret not in everything
    assert b"tick_s = 3" in contents["config/amdvgpud.toml"]
    assert b'token_file = "/etc/amdvgpud/token"' in contents["config/amdvgpud.toml"]
    assert b"://<removed>@hub/x" in contents["config/conf.d/10-site.toml"]
    assert "config/conf.d/20-broken.toml" not in contents
    assert b"20-broken.toml: left out" in contents["missing.txt"]
    assert contents["machine/sys/module/amdgpu/version"] == b"6.10.5\n"
    assert json.loads(contents["api/leases.json"])["leases"][0]["slice"] == "alice"


def test_two_bundles_of_one_state_are_the_same_bytes(served: FakeDaemon, secretive: Path) -> None:
    contents = bundle.members(Client(served.socket), [], root=secretive, environment={})
    packed = bundle.archive(contents)
    assert packed == bundle.archive(dict(reversed(contents.items())))
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        entries = tar.getmembers()
    assert [e.name for e in entries] == [f"amdvgpud-support/{name}" for name in sorted(contents)]
    assert {(e.mtime, e.uid, e.mode) for e in entries} == {(0, 0, 0o644)}
    assert {"api/gpus.json", "api/events.json", "metrics.txt", "doctor.json", "versions/uname.txt"} <= set(contents)


def test_the_bundle_is_a_new_file_for_its_owner_only(ctl: Ctl, served: FakeDaemon, tmp_path: Path) -> None:
    file = tmp_path / "b.tar.gz"
    told = ctl("support-bundle", str(file))
    assert told.exit_code == 0
    assert told.output.startswith(f"{file}: ")
    assert file.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as tar:
        assert "amdvgpud-support/api/slices.json" in tar.getnames()
    again = ctl("support-bundle", str(file))
    assert (again.exit_code, again.output) == (1, f"amdvgpuctl: {file}: File exists\n")


def test_a_bundle_is_made_without_a_daemon_and_says_what_it_lacks(tmp_path: Path) -> None:
    contents = bundle.members(Client("/nonexistent/api.sock"), [], root=tmp_path, environment={})
    assert contents["missing.txt"].startswith(b"api/system.json: no daemon answers at /nonexistent/api.sock")
    assert "versions/uname.txt" in contents
