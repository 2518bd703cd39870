"""What the kernel says of who uses the GPUs, held against what the ledgers say: the words and the comparison, no I/O.

Owns which process counts as whose, and which bytes no ledger has seen. Does not own where the figures come from
(:mod:`amdvgpud.host.kfd`) nor what follows from them (:mod:`amdvgpud.guard`).
"""

from __future__ import annotations

from dataclasses import dataclass

from amdvgpud.core.model import SliceName


@dataclass(frozen=True, slots=True)
class Belonging:
    """Which slices a process is in. Two slices may be given to one container: then it is in both."""

    slices: tuple[SliceName, ...] = ()
    """Shown by its mounts, which a guest cannot make up."""
    claims: tuple[SliceName, ...] = ()
    """Said by its environment only, which anybody can write: believed where that slice's ledger knows the process."""
