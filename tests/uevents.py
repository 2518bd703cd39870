"""Kernel events by hand, as systemd-udevd passes them on: for programs in a network namespace of their own."""

from __future__ import annotations

import socket
import struct
import subprocess
from functools import lru_cache
from pathlib import Path


def seem_to_have_udevd() -> None:
    """libudev hears udevd only where one runs, which it sees by this file. In a mount namespace of our own."""
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    Path("/run/udev").mkdir()
    Path("/run/udev/control").touch()


@lru_cache
def _hashed(data: bytes) -> int:
    """MurmurHash2, by which libudev's filter knows a subsystem."""
    m, h, mask = 0x5BD1E995, len(data), 0xFFFFFFFF
    whole = len(data) // 4 * 4
    for (k,) in struct.iter_unpack("<I", data[:whole]):
        k = k * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    if tail := data[whole:]:
        h = (h ^ int.from_bytes(tail, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def send_uevent(action: str, path: str, subsystem: str = "drm", **more: str | bytes) -> None:
    """As systemd-udevd does: to libudev's group, behind its header of 40 bytes."""
    values = {"ACTION": action, "DEVPATH": path, "SUBSYSTEM": subsystem, "SEQNUM": "1", **more}
    texts = {key: text if isinstance(text, bytes) else text.encode() for key, text in values.items()}
    body = b"".join(key.encode() + b"=" + text + b"\0" for key, text in texts.items())
    head = b"libudev\0" + struct.pack("!I", 0xFEEDCAFE) + struct.pack("=III", 40, 40, len(body))
    _group().sendto(head + struct.pack("!IIII", _hashed(subsystem.encode()), 0, 0, 0) + body, (0, 2))


@lru_cache
def _group() -> socket.socket:
    group = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15)
    group.bind((0, 0))
    return group
