"""Who lives, by made-up /proc trees."""

from __future__ import annotations

from pathlib import Path

from amdvgpud.host.living import Processes, read_processes


def a_proc(root: Path, *, own: int, processes: dict[int, tuple[int, int, int, str]]) -> Path:
    """A made-up /proc: pid -> (namespace inode, pid as counted there, start ticks, state)."""
    (root / "self/ns").mkdir(parents=True)
    (root / "self/ns/pid").symlink_to(f"pid:[{own}]")
    for pid, (namespace, inner, start, state) in processes.items():
        (root / f"{pid}/ns").mkdir(parents=True)
        if namespace:
            (root / f"{pid}/ns/pid").symlink_to(f"pid:[{namespace}]")
        fields = ["0"] * 50
        fields[0], fields[17], fields[19] = state, "1", str(start)
        (root / f"{pid}/stat").write_text(f"{pid} (a (b) c) {' '.join(fields)}\n")
        numbers = f"{pid}" if namespace == own else f"{pid}\t{inner}"
        (root / f"{pid}/status").write_text(f"Name:\tx\nNSpid:\t{numbers}\n")
    return root


def test_death_is_only_what_proc_certainly_shows(tmp_path: Path) -> None:
    machine, container = 0xEFFFFFFC, 4026532999
    there = {1: (machine, 1, 5, "S"), 900: (container, 7, 50, "S"), 901: (container, 8, 60, "Z"), 902: (0, 9, 70, "S")}
    seen = read_processes(a_proc(tmp_path / "a", own=machine, processes=there))
    assert seen == Processes({(machine, 1): 5, (container, 7): 50}, frozenset({(9, 70)}), machine)
    verdicts = {
        "alive": seen.gone(7, container, 50, False),
        "its number has another process": seen.gone(7, container, 49, False),
        "start not yet written": seen.gone(7, container, 0, False),
        "being reclaimed by a living one": seen.gone(7, container, 49, True),
        "zombie": seen.gone(8, container, 60, False),
        "never there": seen.gone(70, container, 1000, False),
        "its whole namespace is gone": seen.gone(7, 4026539999, 50, False),
        "may be one whose namespace we cannot see": seen.gone(9, 4026539999, 70, False),
        "the same, its start not known": seen.gone(9, 4026539999, 0, False),
        "shares but its number with one that we cannot see": seen.gone(9, 4026539999, 71, False),
    }
    assert [name for name, gone in verdicts.items() if gone] == [
        "its number has another process",
        "zombie",
        "never there",
        "its whole namespace is gone",
        "shares but its number with one that we cannot see",
    ]


def test_from_inside_a_container_only_its_own_processes_can_be_judged(tmp_path: Path) -> None:
    own, other = 4026532999, 4026533000
    seen = read_processes(a_proc(tmp_path / "a", own=own, processes={1: (own, 1, 5, "S")}))
    assert (seen.gone(2, own, 9, False), seen.gone(2, other, 9, False)) == (True, False)


def test_a_proc_that_hides_others_is_not_death(tmp_path: Path) -> None:
    hidden = read_processes(a_proc(tmp_path / "a", own=0xEFFFFFFC, processes={50: (0xEFFFFFFC, 50, 5, "S")}))
    assert not hidden.gone(2, 0xEFFFFFFC, 9, False)
    absent = read_processes(tmp_path / "nothing")
    assert not absent.gone(2, 0xEFFFFFFC, 9, False)
