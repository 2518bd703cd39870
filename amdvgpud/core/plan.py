"""Placement: rows, not ranges. (Contract; see the planner's tests.)"""

from __future__ import annotations

from dataclasses import dataclass

from amdvgpud.core.model import Book, Inventory, Request, Share, Slice


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request would go: one Share a GPU, in KFD node order."""

    request: Request
    shares: tuple[Share, ...]


def place(book: Book, inventory: Inventory, request: Request) -> Plan:
    """``NoRoom`` names the roomiest partition and what is missing; a slice of the same name is looked past."""
    raise NotImplementedError


def resize(book: Book, inventory: Inventory, item: Slice, vram_bytes: int) -> Plan:
    """The same CUs with another VRAM quota on each GPU."""
    raise NotImplementedError
