"""What the container runtime's own configuration on this machine says of CDI. Reads files; runs and asks nothing.

``containerd config dump`` would say what is in force, and is another container runtime's program run as root by us;
the files are read instead, with what they import. Sources: containerd-config.toml(5), crio.conf(5), k3s and rke2 (whose
containerd has a file of its own, known by the version's suffix).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from amdvgpud.core.cdi_runtimes import CdiWords, words_of

_CONTAINERD: Final = "/etc/containerd/config.toml"
_OF_DISTRIBUTIONS: Final = {
    "k3s": "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "rke2": "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
}
_CRIO: Final = "/etc/crio/crio.conf"


def read_cdi_words(runtime: str, version: str, file: Path | None, root: Path = Path("/")) -> CdiWords:
    """``file`` None: where ``runtime`` (``containerd`` or ``cri-o``) in ``version`` has it. Never raises: ``lack`` says
    why nothing is known."""
    path = root / str(file or _default(runtime, version)).lstrip("/")
    try:
        documents = list(_documents(path, root))
        if runtime == "cri-o":
            drop_ins = path.with_name(f"{path.name}.d")
            documents += [tomllib.loads(part.read_text("utf-8")) for part in sorted(drop_ins.glob("*.conf"))]
    except FileNotFoundError as error:
        # A runtime without its file has its defaults; in a container it may only not be mounted. Nothing is said.
        return CdiWords(source=str(path), lack=f"there is no {error.filename} here")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, TypeError, AttributeError) as error:
        return CdiWords(source=str(path), lack=f"{path} cannot be read: {error}")
    return words_of(documents, str(path))


def _default(runtime: str, version: str) -> str:
    if runtime == "cri-o":
        return _CRIO
    return next((path for mark, path in _OF_DISTRIBUTIONS.items() if f"-{mark}" in version), _CONTAINERD)


def _documents(path: Path, root: Path) -> Iterator[dict[str, Any]]:
    """The file, then what it imports, each after the other, as containerd merges them. Imports of imports are not
    followed: nobody was seen to have any, and what they would say is then not known."""
    main = tomllib.loads(path.read_text("utf-8"))
    yield main
    for pattern in main.get("imports", ()):
        base = root if pattern.startswith("/") else path.parent
        for part in sorted(base.glob(pattern.lstrip("/"))):
            yield tomllib.loads(part.read_text("utf-8"))
