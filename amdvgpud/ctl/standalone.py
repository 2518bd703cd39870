"""A slice without a daemon: discovered, placed and written by this process, for this one command.

The only module of amdvgpuctl that touches :mod:`amdvgpud.host`. The placement is on an empty Book: what a daemon and
other standalone commands have granted is not known here, so quotas hold for each command and no sum is promised.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from amdvgpud.core.errors import HostFailure, NotFound
from amdvgpud.core.model import Book, Slice
from amdvgpud.core.plan import place
from amdvgpud.core.render import slice_environment
from amdvgpud.core.sizes import human_size
from amdvgpud.core.wire import SliceSpec, request_of
from amdvgpud.ctl.delivery import Grant
from amdvgpud.ctl.libraries import gate_library, softkfd_library
from amdvgpud.host.ledger import write_slice
from amdvgpud.host.sysfs import SysfsReader


@contextmanager
def granted(spec: SliceSpec, sysfs_root: str) -> Iterator[tuple[Grant, str]]:
    """(the grant, what it gives as a text) for as long as the context lasts; its files go with it.

    ``sysfs_root`` other than ``/`` is another machine's tree. Where that is a simulated one, the command reaches its
    simulated GPUs. Raises what placing raises (``NoRoom``, ``Invalid``, ``NotFound``), and ``HostFailure``.
    """
    root = Path(sysfs_root).absolute()
    request = request_of(f"standalone-{os.getpid()}", spec)
    inventory = SysfsReader(root).read_inventory()
    if not inventory.gpus:
        found = "; ".join(f"{u.pci_address or u.name}: {u.reason}" for u in inventory.unusable)
        raise NotFound(f"there is no usable AMD GPU under {root}" + (f" ({found})" if found else ""))
    plan = place(Book(), inventory, request)
    item = Slice(request.name, request, plan.shares, time.time(), 0, os.geteuid())
    environment, preload = slice_environment(item, inventory, all_nodes_visible=True), [gate_library()]
    if (root / "gpus.conf").is_file():
        environment["SOFTKFD_ROOT"] = str(root)
        preload.append(softkfd_library(preload[0]))
    # mkdtemp: 0700 and a name that nobody could have put there before us, also in /tmp.
    parent = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    try:
        home = Path(tempfile.mkdtemp(prefix="amdvgpu-", dir=parent))
    except OSError as e:
        raise HostFailure(f"{parent}: cannot make a directory for the slice: {e.strerror}") from e
    try:
        write_slice(home / "guest", item, inventory, sysfs_root=root)
        what = ", ".join(f"{human_size(s.vram_bytes)} and {s.granted_cus} CUs of {s.partition}" for s in plan.shares)
        yield Grant(item.name, home / "guest", environment, tuple(preload)), what
    finally:
        shutil.rmtree(home, ignore_errors=True)
