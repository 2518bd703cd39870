"""What a package ships, by whom and under which licence: a CycloneDX 1.5 SBOM and a Debian copyright file.

    python3 packaging/sbom.py --root TREE --package NAME --wheels DIR --sbom FILE --copyright FILE

Reads the ``*.dist-info`` found in TREE: what is listed is what is there, not what a lock wished for. A distribution
without a licence that we can name by its SPDX id stops the build: nothing is shipped unread. Sources: CycloneDX 1.5
JSON schema; PEP 639 (licence metadata); Debian copyright format 1.0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import textwrap
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
OWN = "amdvgpud"
OWN_LICENCE = "Apache-2.0"

SPDX_OF = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "bsd license": "BSD-3-Clause",
    "mit": "MIT",
    "mit license": "MIT",
    "psf-2.0": "PSF-2.0",
}
"""What distributions wrote before PEP 639, by the texts that lie beside; read once, by hand, for those in the lock."""

KNOWN = ("Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "LGPL-2.1-or-later", "MIT", "MIT-0", "PSF-2.0")
"""Licences that we have looked at and may ship beside Apache-2.0. Another one needs a look first."""

COMMON = {"Apache-2.0": "Apache-2.0", "LGPL-2.1-or-later": "LGPL-2.1"}
"""Licences whose full text every Debian system has under /usr/share/common-licenses."""


@dataclass(frozen=True)
class Distribution:
    name: str
    version: str
    licence: str
    """An SPDX expression."""
    folder: Path
    texts: tuple[Path, ...]
    wheel_sha256: str | None

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{re.sub(r'[-_.]+', '-', self.name).lower()}@{self.version}"

    @property
    def files(self) -> Iterator[str]:
        """Path patterns, absolute within the package, of what it installed."""
        tops = {line.partition("/")[0].partition(",")[0] for line in (self.folder / "RECORD").read_text().splitlines()}
        for top in sorted(tops - {"", "..", "__pycache__"}):
            yield f"{top}/*" if (self.folder.parent / top).is_dir() else top


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--root", "--wheels", "--sbom", "--copyright"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--package", required=True)
    given = parser.parse_args()
    shipped = list(distributions(given.root, given.wheels))
    given.sbom.write_text(json.dumps(sbom(given.package, own_version(), given.root, shipped), indent=1) + "\n")
    given.copyright.write_text(copyright_file(given.root, shipped))


def own_version() -> str:
    text = (REPOSITORY / "amdvgpud/__init__.py").read_text()
    if match := re.search(r'__version__[^"]*"([^"]+)"', text):
        return match.group(1)
    sys.exit("amdvgpud/__init__.py states no version")


def distributions(root: Path, wheels: Path) -> Iterator[Distribution]:
    """Those whose metadata lie under ``root``, by name. Exits where a licence is unknown."""
    hashes = {path.name.split("-")[0].lower(): path for path in wheels.glob("*.whl")}
    for folder in sorted(root.rglob("*.dist-info"), key=lambda p: p.name.lower()):
        metadata = HeaderParser().parsestr((folder / "METADATA").read_text("utf-8"))
        wheel = hashes.get(folder.name.split("-")[0].lower())
        yield Distribution(
            metadata["Name"],
            metadata["Version"],
            _licence(metadata),
            folder,
            tuple(sorted(p for p in folder.rglob("*") if re.match(r"(LICEN[CS]E|COPYING|NOTICE)", p.name))),
            hashlib.sha256(wheel.read_bytes()).hexdigest() if wheel else None,
        )


def _licence(metadata: Message) -> str:
    classifiers = [c.rpartition(" :: ")[2] for c in metadata.get_all("Classifier") or () if c.startswith("License ::")]
    for stated in (metadata["License-Expression"], metadata["License"], *classifiers):
        expression = SPDX_OF.get(str(stated).strip().lower(), str(stated).strip())
        if stated and all(word in (*KNOWN, "AND", "OR") for word in expression.split()):
            return expression
    sys.exit(
        f"{metadata['Name']} {metadata['Version']}: licence {metadata['License-Expression'] or classifiers} is not "
        "among those looked at (packaging/sbom.py, KNOWN): read it before shipping it"
    )


def sbom(package: str, version: str, root: Path, shipped: list[Distribution]) -> dict[str, object]:
    """The CycloneDX document. The same inputs give the same bytes: no random serial, no time of the build."""
    when = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), UTC)
    components = [_component(d) for d in shipped if d.name != OWN]
    components += [_library(path, root, version) for path in sorted(root.glob("usr/lib/amdvgpu/*.so"))]
    # C libraries that a wheel carries: their version is stated nowhere but in the wheel's own sources.
    carried = (path for d in shipped for path in sorted(d.folder.parent.glob(f"{d.name}.libs/*.so*")))
    components += [_library(path, root, None) for path in carried]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": when.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "bom-ref": f"{package}@{version}",
                "name": package,
                "version": version,
                "licenses": [{"expression": OWN_LICENCE}],
            },
        },
        "components": components,
        "dependencies": [{"ref": f"{package}@{version}", "dependsOn": [c["bom-ref"] for c in components]}],
    }
    content = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(document, sort_keys=True))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "serialNumber": f"urn:uuid:{content}",
    } | document


def _component(d: Distribution) -> dict[str, object]:
    known: dict[str, object] = {"hashes": [{"alg": "SHA-256", "content": d.wheel_sha256}]} if d.wheel_sha256 else {}
    return {
        "type": "library",
        "bom-ref": d.purl,
        "name": d.name,
        "version": d.version,
        "purl": d.purl,
        "licenses": [{"expression": d.licence}],
    } | known


def _library(path: Path, root: Path, version: str | None) -> dict[str, object]:
    name = str(path.relative_to(root))
    return {
        "type": "library",
        "bom-ref": name,
        "name": path.name,
        **({"version": version, "licenses": [{"expression": OWN_LICENCE}]} if version else {}),
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}],
    }


def copyright_file(root: Path, shipped: list[Distribution]) -> str:
    stanzas = [
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nUpstream-Name: amdvgpud\n",
        f"Files: *\nCopyright: 2026 amdvgpud developers\nLicense: {OWN_LICENCE}\n",
    ]
    needed = {OWN_LICENCE}
    for d in shipped:
        if d.name == OWN:
            continue
        where = "/" + str(d.folder.parent.relative_to(root))
        files = "\n       ".join(f"{where}/{name}" for name in d.files)
        holders = "\n           ".join(_holders(d)) or f"the authors of {d.name}"
        words = d.licence.split()
        needed |= {w for w in words if w in COMMON}
        # Of Apache's and the LGPL's the place is named at the end; of the others, each distribution has its own text.
        texts = [] if all(w in COMMON for w in words) else [t.read_text("utf-8", "replace") for t in d.texts]
        text = _indented("\n\n".join(t for t in texts if "Apache License" not in t)) if texts else ""
        label = (
            d.licence.replace(" AND ", " and ") if not text else f"{d.licence.replace(' AND ', '-and-')}-of-{d.name}"
        )
        stanzas.append(f"Files: {files}\nCopyright: {holders}\nLicense: {label}\n{text}")
    place = "On Debian systems the full text is in /usr/share/common-licenses"
    stanzas += [f"License: {licence}\n {place}/{COMMON[licence]}.\n" for licence in sorted(needed)]
    return "\n".join(stanzas)


def _holders(d: Distribution) -> list[str]:
    found: list[str] = []
    for path in d.texts:
        for line in path.read_text("utf-8", "replace").splitlines():
            match = re.match(r"\s*(?:copyright|©)\s*(?:\(c\)|©)?[:\s]*(\d{4}.*\w.*)", line, re.IGNORECASE)
            if match and match.group(1).strip() not in found:
                found.append(match.group(1).strip())
    return found


def _indented(text: str) -> str:
    lines = (line.rstrip() or "." for line in text.replace("\f", "").splitlines())
    return textwrap.indent("\n".join(lines), " ") + "\n"


if __name__ == "__main__":
    main()
