"""The kernel's cap on VRAM, put by the installed daemon on real containers and scopes. check-in-vm runs this, on a
kernel that has the dmem controller, with a stand-in for the driver (tests/e2e/vm). See machine.py.

The daemon's GPU is simulated, at the PCI address where the stand-in's device is, so that their region is one: what is
charged to it is charged through a file of the stand-in, by processes of the container, and refused by the kernel.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from tests.e2e.systemd.machine import (
    DROP_INS,
    api,
    check,
    ctl,
    drop_in,
    image,
    main,
    run,
    show,
    simulate,
    until,
)
from tests.e2e.vm.dmem_checks import CHECKS
from tests.e2e.vm.kernel import Kernel

GIB = 1 << 30
ADDRESS = "0000:01:00.0"
REGION = f"drm/{ADDRESS}/vram"
PCI = Path("/sys/bus/pci")
DEVICE = PCI / "devices" / ADDRESS
CARD = PCI / "devices/0000:01:01.0"
"""A device of AMD's vendor id, which the stand-in drives too where it is told so."""
TREE = Path("/sys/fs/cgroup")
SAID = Path("/run/said")
HOOK = Path("/usr/lib/amdvgpu/amdvgpu-hook")
ALLOWANCE = 64 << 20
"""The default of dmem.allowance."""
ALICE = 4 * GIB + ALLOWANCE
PODMAN = ("podman", "--runtime=crun", "--cgroup-manager=systemd", "--events-backend=file")
IMAGE = "localhost/glibc:1"
FIRST = f"""
if echo {ALICE + 1} >/gpu/fake_charge; then echo more; else echo refused; fi >/said/over 2>&1
if echo {ALICE} >/gpu/fake_charge; then echo granted; else echo refused; fi >/said/all 2>&1
"""
"""The first that a container does: what is a byte over the cap, then what is just the cap."""


def limit(cgroup: Path) -> str | None:
    lines = (line.split() for line in (cgroup / "dmem.max").read_text().splitlines())
    return dict(lines).get(REGION)


def charged(cgroup: Path, size_bytes: int) -> bool:
    """Whether a process in the cgroup may take so much."""
    script = f"echo $$ >{cgroup}/cgroup.procs && echo {size_bytes} >{DEVICE}/fake_charge"
    return subprocess.run(["sh", "-c", script], stderr=subprocess.DEVNULL, check=False).returncode == 0


def give_back() -> None:
    """All charges of the stand-in. It keeps them until told so, whoever has ended."""
    if (file := DEVICE / "fake_charge").exists():
        file.write_text("0")


def seen(name: str) -> tuple[str, list[str]]:
    """By what the slice is enforced, and of each of its containers why it is not capped."""
    item = api(f"/v1/slices/{name}")
    return item["enforced_by"], [one["cap"] for one in item["containers"]]


@contextmanager
def container(*slices: str, first: str = "") -> Iterator[Path]:
    """A container that has the slices and does ``first``; its cgroup, which the runtime made."""
    SAID.mkdir(exist_ok=True)
    options = [f"--device=amdvgpu.io/slice={name}" for name in slices]
    options += [f"--mount=type=bind,source={DEVICE.resolve()},target=/gpu", f"--volume={SAID}:/said"]
    name = run(*PODMAN, "run", "-d", "--rm", "--network=host", *options, IMAGE, "sh", "-c", f"{first}\nexec sleep 9999")
    name = name.split()[-1]
    try:
        yield TREE / f"machine.slice/libpod-{name}.scope"
    finally:
        run(*PODMAN, "rm", "--force", "--time=0", name, code=None)
        give_back()
        until("the container is forgotten", lambda: not any(one["containers"] for one in api("/v1/slices")["slices"]))


def inner(scope: Path) -> Path:
    """The cgroup in the container's own that its processes are in."""
    return next((p.parent for p in sorted(scope.rglob("cgroup.procs")) if p.read_text().strip()), scope)


def word(file: str) -> str:
    until(f"/said/{file}", lambda: (SAID / file).exists() and (SAID / file).read_text())
    return (SAID / file).read_text().split()[-1]


def plug(*, into: bool) -> None:
    if into:
        (PCI / "rescan").write_text("1")
    else:
        (DEVICE / "remove").write_text("1")
    until("the region", lambda: (REGION in (TREE / "dmem.capacity").read_text()) == into)


@check
def the_daemon_has_a_gpu_where_the_kernel_has_a_region() -> None:
    run("insmod", "/mnt/fakeamd.ko")
    until("the region", lambda: REGION in (TREE / "dmem.capacity").read_text())
    # An emulated machine is some ten times slower than a real one: the hook waits longer for the cap, here only.
    HOOK.rename(HOOK.with_suffix(".real"))
    HOOK.write_text(f'#!/bin/sh\nexec {HOOK}.real "$@" --wait 9000\n')
    HOOK.chmod(0o755)
    simulate("mi300x:bus=1:vram=16GiB")
    ctl("slice", "create", "alice", "--gpu", "0", "--vram", "4GiB", "--compute", "25%")
    ctl("slice", "create", "bob", "--gpu", "0", "--vram", "2GiB", "--compute", "25%")
    run(*PODMAN, "import", str(image("/usr/bin/sh")), IMAGE)


@check
def without_the_drop_in_a_container_starts_and_is_said_to_be_uncapped() -> None:
    with container("alice", first="echo started >/said/first") as scope:
        assert word("first") == "started"
        by, (why,) = seen("alice")
        assert by == "gate"
        assert "read-only for this daemon (systemd: the drop-in dmem.conf opens it)" in why
        assert not (scope / "dmem.max").exists()


@check
def with_delegation_off_the_lack_of_the_controller_is_said() -> None:
    (DROP_INS / "dmem.conf").symlink_to("/usr/share/amdvgpud/systemd/dmem.conf")
    with drop_in("delegate", "[Service]\nEnvironment=AMDVGPUD_DMEM_DELEGATE=false\n"):
        run("systemctl", "restart", "amdvgpud.service")
        with container("alice") as scope:
            by, (why,) = seen("alice")
            assert by == "gate"
            assert "has no dmem, and dmem.delegate is false" in why
            assert not (scope / "dmem.max").exists()
    run("systemctl", "restart", "amdvgpud.service")


@check
def a_container_is_capped_before_its_first_allocation() -> None:
    with container("alice", first=FIRST) as scope:
        assert (word("over"), word("all")) == ("refused", "granted")
        assert (limit(scope), seen("alice")) == (str(ALICE), ("gate+dmem", [""]))
        assert not charged(inner(scope), 1)
    assert not scope.exists()
    assert seen("alice") == ("gate", [])


@check
def a_cap_outlives_the_daemon_and_one_that_was_lost_meanwhile_is_put_back() -> None:
    with container("alice") as scope:
        until("the cap", lambda: limit(scope) == str(ALICE))
        run("systemctl", "stop", "amdvgpud.socket", "amdvgpud.service")
        assert limit(scope) == str(ALICE)
        (scope / "dmem.max").write_text(f"{REGION} max\n")
        run("systemctl", "start", "amdvgpud.service")
        until("the cap again", lambda: limit(scope) == str(ALICE))
        until("the word of it", lambda: seen("alice") == ("gate+dmem", [""]))


@check
def a_cap_is_put_back_after_the_device_was_away() -> None:
    with container("alice") as scope:
        plug(into=False)
        until("the lack is said", lambda: "knows no region" in (seen("alice")[1] or [""])[0])
        assert seen("alice")[0] == "gate"
        plug(into=True)
        until("the cap again", lambda: limit(scope) == str(ALICE))
        until("the word of it", lambda: seen("alice") == ("gate+dmem", [""]))
        assert not charged(inner(scope), ALICE + 1)
        assert charged(inner(scope), ALICE)


@check
def a_cap_is_put_back_after_the_driver_was_loaded_anew() -> None:
    with container("alice") as scope:
        give_back()
        run("udevadm", "settle")  # it may have a node of the stand-in's open
        run("rmmod", "fakeamd")
        until("the lack is said", lambda: "knows no region" in (seen("alice")[1] or [""])[0])
        run("insmod", "/mnt/fakeamd.ko")
        until("the cap again", lambda: limit(scope) == str(ALICE))
        until("the word of it", lambda: seen("alice") == ("gate+dmem", [""]))
        assert not charged(inner(scope), ALICE + 1)


@check
def slices_of_one_container_add_up() -> None:
    with container("alice", "bob") as scope:
        assert limit(scope) == str(6 * GIB + ALLOWANCE)
        assert [seen(name) for name in ("alice", "bob")] == [("gate+dmem", [""])] * 2
        assert not charged(inner(scope), 6 * GIB + ALLOWANCE + 1)
        assert charged(inner(scope), 6 * GIB + ALLOWANCE)


@check
def what_a_container_holds_is_told_by_the_kernels_count_and_absent_without_one() -> None:
    def told() -> tuple[int | None, list[int | None], list[int]]:
        item = api("/v1/slices/alice")
        containers = [one["dmem_bytes"] and sum(one["dmem_bytes"].values()) for one in item["containers"]]
        with urlopen("http://127.0.0.1:9841/metrics") as answer:
            series = re.findall(r"^amdvgpu_slice_vram_dmem_bytes\{.*\} (\d+)", answer.read().decode(), re.MULTILINE)
        return item["shares"][0]["dmem_bytes"], containers, [int(n) for n in series]

    with container("alice") as scope:
        assert charged(inner(scope), 3 * GIB)
        until("the count", lambda: told() == (3 * GIB, [3 * GIB], [3 * GIB]))
        give_back()
        until("nothing held", lambda: told() == (0, [0], [0]))
    assert told() == (None, [], [])


@check
def a_limit_below_what_is_used_is_never_said_to_hold_where_it_does_not() -> None:
    with container("alice") as scope:
        assert charged(inner(scope), 3 * GIB)
        ctl("slice", "resize", "alice", "--vram", "1GiB")
        wanted = str(GIB + ALLOWANCE)

        def told() -> bool:
            by, (why,) = seen("alice")
            return (by, why) == ("gate+dmem", "") if limit(scope) == wanted else by == "gate" and "left it at" in why

        until("the truth", told)
        print(f"    # used 3 GiB, cap wanted {wanted}, in force {limit(scope)}; said: {seen('alice')}", flush=True)
        give_back()
        until("the cap, when there is room", lambda: limit(scope) == wanted and seen("alice") == ("gate+dmem", [""]))
        ctl("slice", "resize", "alice", "--vram", "4GiB")
        until("the larger one", lambda: limit(scope) == str(ALICE))


@check
def a_cap_stays_where_the_slice_is_taken_away_and_goes_where_caps_are_switched_off() -> None:
    ctl("slice", "create", "carol", "--gpu", "0", "--vram", "1GiB", "--compute", "10%")
    with container("carol") as scope:
        assert limit(scope) == str(GIB + ALLOWANCE)
        ctl("slice", "delete", "--force", "carol")
        run("systemctl", "restart", "amdvgpud.service")
        assert limit(scope) == str(GIB + ALLOWANCE)
        with drop_in("uncapped", "[Service]\nEnvironment=AMDVGPUD_DMEM_ENABLED=false\n"):
            run("systemctl", "restart", "amdvgpud.service")
            until("no cap", lambda: limit(scope) == "max")
    run("systemctl", "restart", "amdvgpud.service")


@check
def a_command_is_capped_in_a_scope_of_its_own_before_its_first_allocation() -> None:
    # By a path of its own: what stands in for the simulated driver answers for those of its device in the command.
    place = Path("/run/gpu")
    place.mkdir()
    run("mount", "--bind", str(DEVICE.resolve()), str(place))
    script = FIRST.replace("/gpu", str(place)).replace("/said", str(SAID)) + "\ncat /proc/self/cgroup; read -r line"
    for file in SAID.iterdir():
        file.unlink()
    started = subprocess.Popen(
        ["amdvgpuctl", "run", "--slice", "alice", "--", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert started.stdout is not None
    said, cgroup = started.stdout.readline(), started.stdout.readline().removeprefix("0::").strip()
    try:
        assert re.fullmatch(r"/system\.slice/amdvgpu-run-[0-9a-f]{64}\.scope", cgroup), (said, cgroup)
        first = word("over"), word("all")
        assert first == ("refused", "granted"), first
        assert (limit(TREE / cgroup[1:]), seen("alice")) == (str(ALICE), ("gate+dmem", [""]))
    finally:
        give_back()
        started.communicate("\n")
        run("umount", str(place))
    assert started.returncode == 0
    until("it is forgotten", lambda: seen("alice") == ("gate", []))
    until("the scope is gone", lambda: show(Path(cgroup).name, "ActiveState") == ["inactive"])
    assert not (TREE / cgroup[1:]).exists()


@check
def a_card_that_comes_and_goes_is_seen_as_a_fresh_start_sees_it() -> None:
    """On the machine's own sysfs, where the stand-in's card is no GPU to share, for want of a KFD.

    The periodic scan is an hour away: what the daemon sees of a change it was told by the kernel.
    """

    def seen() -> str:
        answer = api("/v1/gpus")
        assert answer["gpus"] == []
        return ", ".join(f"{one['pci_address']}: {one['reason']}" for one in answer["unusable"])

    with drop_in("without-simulation", "[Service]\nEnvironment=AMDVGPUD_SIMULATE= AMDVGPUD_RESCAN_S=3600\n"):
        run("systemctl", "restart", "amdvgpud.service")
        assert seen().endswith("no driver is bound to it"), seen()
        for file, text, end in (
            (PCI / "drivers/amdgpu/new_id", "1002 5046", "without compute (HSA) support"),
            (CARD / "remove", "1", ""),
            (PCI / "rescan", "1", "without compute (HSA) support"),
            (PCI / "drivers/amdgpu/unbind", CARD.name, "no driver is bound to it"),
        ):
            file.write_text(text)
            until(f"{file}: {end or 'nothing'}", lambda end=end: seen().endswith(end) if end else not seen())  # type: ignore[misc]
            heard = seen()
            run("systemctl", "restart", "amdvgpud.service")
            assert seen() == heard


@check
def the_checks_of_the_unit_tests_cgroup_tree_hold_on_the_kernels_own() -> None:
    for number, holds in enumerate(CHECKS):
        machine = Kernel(number, ADDRESS)
        try:
            holds(machine)
        except AssertionError as error:
            raise AssertionError(f"{holds.__name__}: {error}") from error
        finally:
            machine.leave()


if __name__ == "__main__":
    sys.exit(main())
