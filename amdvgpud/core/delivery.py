"""How pods get their slices: by CDI names where the cluster node's kubelet and runtime resolve them, else by nodes.

Pure. A name that nobody resolves is the worse mistake: the container starts without a GPU and no error says so, while
device nodes, mounts and variables are known to every kubelet. So names are chosen only where both are known to take
them, and what is not known is said, with what to set.

Sources: KEP-4009 (CDI devices of device plugins: beta and on from kubelet 1.29), containerd's CRI plugin (CDI is
switched on by ``enable_cdi`` in 1.7 and by default from 2.0), CRI-O (always on); :mod:`amdvgpud.core.cdi_runtimes`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from amdvgpud.core.cdi_runtimes import CDI_VERSION, CdiWords, looks_into, refusal, to_switch_on
from amdvgpud.core.errors import Invalid

Way = Literal["cdi", "nodes"]

_KUBELET: Final = (1, 29)
_SCHEMES: Final = {"containerd": "containerd", "cri-o": "cri-o"}
"""What a Node calls its runtime, and what :mod:`cdi_runtimes` does. Docker behind cri-dockerd is not known to take CDI
names from a kubelet, whatever docker itself can."""


@dataclass(frozen=True, slots=True)
class Choice:
    """``reason`` is a sentence without its full stop. ``known`` False: it may be another when asked again."""

    way: Way
    reason: str
    known: bool = True


@dataclass(frozen=True, slots=True)
class NodeSoftware:
    """As a Node's ``status.nodeInfo`` has it: ``v1.35.4`` and ``containerd://2.1.3``."""

    kubelet: str
    runtime: str

    @property
    def runtime_name(self) -> str:
        return self.runtime.partition("://")[0]

    @property
    def runtime_version(self) -> str:
        return self.runtime.partition("://")[2]


def choose(software: NodeSoftware, words: CdiWords, cdi_dir: str) -> Choice:
    """``words``: what the runtime's own configuration says of CDI, as far as it can be read here."""
    kubelet = re.match(r"v?(\d+)\.(\d+)", software.kubelet)
    if kubelet is None:
        return Choice("nodes", f"the kubelet's version {software.kubelet!r} is no version")
    if (int(kubelet[1]), int(kubelet[2])) < _KUBELET:
        return Choice("nodes", f"kubelet {software.kubelet} takes no CDI names from device plugins: 1.29 is the first")
    name, version = _SCHEMES.get(software.runtime_name), software.runtime_version
    if name is None:
        return Choice("nodes", f"nobody knows whether {software.runtime or 'this runtime'} resolves CDI names")
    try:
        if why_not := refusal(name, version, CDI_VERSION, cdi_dir):
            return Choice("nodes", why_not)
        off = to_switch_on(name, version, "/run/cdi")
    except Invalid as error:
        return Choice("nodes", error.detail)
    who = f"{name} {version}"
    if words.enabled is False:
        return Choice("nodes", f"CDI is switched off in {who} by {words.source}")
    if off and words.enabled is None:
        return Choice("nodes", f"CDI is off in {who} unless its configuration switches it on, and {words.lack}")
    if not looks_into(words.dirs, cdi_dir):
        where = words.source if words.dirs else "its defaults"
        return Choice("nodes", f"{who} does not look for CDI files in {cdi_dir}, by {where}")
    on = f", switched on by {words.source}" if off else ""
    return Choice("cdi", f"kubelet {software.kubelet} and {who} resolve CDI names{on}")
