"""What is true of a cgroup tree with dmem, checked on the stand-in of the tests and, in a VM, on a kernel's own.

Standard library only: in the VM there is nothing else. Each check takes a machine of its own and asserts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from amdvgpud.host.cgroup import DmemCaps, Files

GIB: Final = 2**30
MIB: Final = 2**20


class Machine(Protocol):
    """One GPU with a dmem region, and a fresh part of the cgroup tree: ``/slice/a`` below ``/slice``, empty."""

    files: Files
    region: str
    above: str
    cgroup: str

    def charge(self, size_bytes: int) -> bool:
        """Take VRAM from within ``cgroup``; whether the kernel lets it."""
        ...

    def live_above(self) -> None:
        """Put a process into ``above``."""
        ...

    def unplug(self) -> None: ...

    def plug_in(self) -> None: ...


def limit(machine: Machine) -> str | None:
    lines = (line.split() for line in machine.files.read(f"{machine.cgroup}/dmem.max").splitlines())
    return dict(lines).get(machine.region)


def capped(machine: Machine, limit_bytes: int, caps: DmemCaps | None = None) -> str:
    return (caps or DmemCaps(machine.files)).apply({machine.cgroup: {machine.region: limit_bytes}})[machine.cgroup]


def a_cap_holds(machine: Machine) -> None:
    assert DmemCaps(machine.files).lack() is None
    assert capped(machine, GIB) == ""
    assert limit(machine) == str(GIB)
    assert machine.charge(512 * MIB)
    assert not machine.charge(GIB), "more than the cap was let through"
    assert machine.charge(512 * MIB), "what fits to the byte was refused"
    assert not machine.charge(1)


def odd_numbers_are_read_back_as_they_were_written(machine: Machine) -> None:
    assert capped(machine, GIB + 12345) == ""
    assert limit(machine) == str(GIB + 12345)


def it_is_never_said_to_hold_where_it_does_not(machine: Machine) -> None:
    """Kernels differ: some leave the limit where it was, without an error; some evict, or refuse the write."""
    assert capped(machine, GIB) == ""
    assert machine.charge(512 * MIB)
    said = capped(machine, 256 * MIB)
    assert (said == "") == (limit(machine) == str(256 * MIB)), said
    print(f"lowered below what is used: {said or 'it is in force'}")


def it_is_put_back_after_the_gpu_was_away(machine: Machine) -> None:
    caps = DmemCaps(machine.files)
    assert capped(machine, GIB, caps) == ""
    machine.unplug()
    assert "knows no region" in capped(machine, GIB, caps)
    machine.plug_in()
    assert limit(machine) == "max", "the limit outlived the device"
    assert capped(machine, GIB, caps) == ""
    assert not machine.charge(GIB + 1)


def it_is_lifted_when_it_is_not_wanted_any_more(machine: Machine) -> None:
    caps = DmemCaps(machine.files)
    assert capped(machine, GIB, caps) == ""
    caps.apply({})
    assert limit(machine) == "max"
    assert machine.charge(2 * GIB)


def a_cgroup_above_that_has_processes_is_named(machine: Machine) -> None:
    machine.live_above()
    assert capped(machine, GIB).startswith(f"{machine.above} has processes of its own")


CHECKS: Final[tuple[Callable[[Machine], None], ...]] = (
    a_cap_holds,
    odd_numbers_are_read_back_as_they_were_written,
    it_is_never_said_to_hold_where_it_does_not,
    it_is_put_back_after_the_gpu_was_away,
    it_is_lifted_when_it_is_not_wanted_any_more,
    a_cgroup_above_that_has_processes_is_named,
)
