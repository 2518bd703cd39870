"""Who is at the door, and what they may do.

Owns the rules of both doors: on the unix socket the kernel's word about the peer (unix(7): SO_PEERCRED and, since
Linux 4.13, SO_PEERGROUPS, both as they were at connect), on loopback TCP the Host header and the token file. Does not
own the sockets (``rest.py``) nor which route needs what (``routes.py``).
"""

from __future__ import annotations

import array
import grp
import hmac
import logging
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

log = logging.getLogger(__name__)

_SO_PEERGROUPS: Final = 59  # asm-generic/socket.h; Python has no name for it
_OPTION_BYTES: Final = 1024
"""What CPython lets getsockopt return: 256 groups. Somebody in more counts with the primary group only."""

MIN_TOKEN_BYTES: Final = 16
"""A shorter token opens nothing: an empty or half-written file must not be a key."""

_LOCAL_HOST: Final = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)


class Socket(Protocol):
    """What is needed of a connected socket; asyncio hands out a wrapper, not a ``socket.socket``."""

    @property
    def family(self) -> int: ...

    def getsockopt(self, level: int, optname: int, buflen: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a unix socket, as the kernel recorded it at connect."""

    pid: int
    """0 where it cannot be seen from our pid namespace."""
    uid: int
    gids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Caller:
    """What one request may do."""

    peer: Peer | None
    """None on TCP."""
    may_write: bool
    may_see_details: bool
    """Process lists, and the texts in which people name their workloads."""
    refusal: str
    """Why a change is refused and what would help; empty if it is not."""
    token_missing: bool = False
    """The refusal is one that a token would lift (HTTP 401 rather than 403)."""

    @property
    def uid(self) -> int:
        """The uid that what this caller makes belongs to. A token stands for root, whose file it is read from."""
        return 0 if self.peer is None else self.peer.uid


def peer_of(sock: Socket) -> Peer:
    """The peer of a connected unix socket. ``OSError`` where the kernel does not tell."""
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    groups = array.array("I")
    try:
        groups.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _OPTION_BYTES))
    except OSError as error:
        log.debug("The supplementary groups of uid %s are not known, they count as none: %s", uid, error)
    return Peer(pid, uid & 0xFFFFFFFF, frozenset({gid & 0xFFFFFFFF, *groups}))


def group_id(name: str) -> int | None:
    """The number of group ``name``; None where this machine has none of that name."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def host_is_local(header: str | None) -> bool:
    """Whether a Host header names this machine. Any port: a tunnel has its own.

    A page of a foreign name that was rebound to 127.0.0.1 sends the foreign name, and is refused by this.
    """
    return header is not None and _LOCAL_HOST.fullmatch(header) is not None


def token_opens(authorization: str | None, token_file: Path) -> bool:
    """Whether an Authorization header holds the token. The file is read each time: changing it changes the lock."""
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() != "bearer":
        return False
    try:
        token = token_file.read_bytes().strip()
    except OSError as error:
        log.warning("No change can be made over TCP: the token file cannot be read: %s", error)
        return False
    if len(token) < MIN_TOKEN_BYTES:
        log.warning("No change can be made over TCP: %s holds less than %d bytes", token_file, MIN_TOKEN_BYTES)
        return False
    return hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token)


def unix_caller(sock: Socket, group: str, own_uid: int = 0) -> Caller:
    """Root, the daemon's own user and members of ``group`` may change things; who else gets in may read."""
    try:
        peer = peer_of(sock)
    except OSError as error:
        log.warning("A peer without credentials may only read: %s", error)
        return Caller(None, False, False, "the kernel does not tell who is asking, so nothing may be changed")
    gid = group_id(group)
    if peer.uid in (0, own_uid) or (gid is not None and gid in peer.gids):
        return Caller(peer, True, True, "")
    return Caller(
        peer,
        False,
        True,
        f"uid {peer.uid} may read only: root and members of the group {group!r} may change things "
        f"(usermod -aG {group} USER, then log in anew)",
    )


def tcp_caller(authorization: str | None, token_file: Path, details: bool) -> Caller:
    """Reads only, unless the token comes with the request."""
    if authorization is not None and token_opens(authorization, token_file):
        return Caller(None, True, True, "")
    return Caller(
        None,
        False,
        details,
        f"changes over TCP need 'Authorization: Bearer TOKEN' with the token of {token_file}; or use the unix socket",
        token_missing=True,
    )
