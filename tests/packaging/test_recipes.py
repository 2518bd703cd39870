"""What packages are made from: the locks, the configuration file, the list of what is shipped."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from amdvgpud.settings import SETTINGS, read_settings, shown

Script = Callable[[str], ModuleType]
LOCKS = ("requirements.lock", "requirements-build.lock")


def pins(path: Path) -> dict[str, list[str]]:
    """Name -> the rest of its entry, a word each."""
    entries = path.read_text().replace("\\\n", " ")
    lines = [line for line in entries.splitlines() if line and not line.lstrip().startswith("#")]
    return {line.partition("==")[0]: line.split() for line in lines}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_entry_of_a_lock_is_one_version_with_its_hashes(lock: str, repository: Path) -> None:
    entries = pins(repository / "packaging" / lock)
    assert entries
    for name, words in entries.items():
        assert re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", words[0]), name
        assert any(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word) for word in words), name


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_names_no_host(lock: str, repository: Path) -> None:
    text = (repository / "packaging" / lock).read_text()
    assert not re.search(r"://|--index|--find-links|--trusted", text)


def test_the_lock_holds_all_that_the_project_requires(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    wanted = {
        re.split(r"[><=; ]", line)[0] for line in project["dependencies"] if "python_version < '3.11'" not in line
    }
    assert wanted - pins(repository / "packaging/requirements.lock").keys() == set()


def test_the_shipped_configuration_sets_nothing(script: Script, tmp_path: Path) -> None:
    file = tmp_path / "amdvgpud.toml"
    file.write_text(script("conffile").conffile())
    assert set(read_settings({}, {}, file).origin.values()) == {"default"}


def test_the_shipped_configuration_shows_every_setting_at_its_default(script: Script, tmp_path: Path) -> None:
    file = tmp_path / "amdvgpud.toml"
    file.write_text(re.sub(r"^#(?! )", "", script("conffile").conffile(), flags=re.MULTILINE))
    settings = read_settings({}, {}, file)
    assert {key: origin for key, origin in settings.origin.items() if origin != str(file)} == {}
    assert settings.origin.keys() == SETTINGS.keys()
    defaults = tmp_path / "empty.toml"
    defaults.write_text("")
    assert shown(settings) == shown(read_settings({}, {}, defaults))


def test_the_gate_and_its_tool_lie_outside_python_and_32_bit_programs_find_a_stand_in(
    script: Script, tmp_path: Path
) -> None:
    site = tmp_path / "usr/lib/amdvgpud/lib/python3/site-packages"
    (site / "amdvgpud/lib32").mkdir(parents=True)
    (tmp_path / "usr/bin").mkdir()
    files = ("libamdvgpu.so", "libsoftkfd.so", "amdvgpu-ledger", "amdvgpu-hook", "lib32/libamdvgpu.so")
    for name in files:
        (site / "amdvgpud" / name).write_text(name)
    script("stage")._place_libraries(tmp_path, site)
    assert [(site / "amdvgpud" / name).read_text() for name in files] == list(files)
    assert (tmp_path / "usr/bin/amdvgpu-ledger").read_text() == "amdvgpu-ledger"
    by_platform = {
        path.name: [(path / name).read_text() for name in ("libamdvgpu.so", "libsoftkfd.so")]
        for path in (tmp_path / "usr/lib/amdvgpu/platform").iterdir()
    }
    assert by_platform == {
        **{key: ["libamdvgpu.so", "libsoftkfd.so"] for key in ("x86_64", "haswell", "xeon_phi")},
        **dict.fromkeys(("i686", "i586"), ["lib32/libamdvgpu.so"] * 2),
    }


def distribution(site: Path, name: str, licence: str) -> None:
    """A distribution as pip leaves it: one module, metadata, a licence text."""
    folder = site / f"{name}-1.0.dist-info"
    (folder / "licenses").mkdir(parents=True)
    (site / f"{name}.py").write_text("")
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{licence}\n")
    (folder / "RECORD").write_text(f"{name}.py,,\n{folder.name}/METADATA,,\n")
    (folder / "licenses/LICENSE").write_text("Copyright (c) 2020 Some Body\n\nDo what you like.\n")


def test_the_sbom_lists_what_is_there_with_version_licence_and_hash(script: Script, tmp_path: Path) -> None:
    sbom = script("sbom")
    distribution(tmp_path / "root/site-packages", "small", "License-Expression: MIT")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "small-1.0-py3-none-any.whl").write_bytes(b"wheel")
    gate = tmp_path / "root/usr/lib/amdvgpu/libamdvgpu.so"
    gate.parent.mkdir(parents=True)
    gate.write_bytes(b"gate")
    shipped = list(sbom.distributions(tmp_path / "root", wheels))
    document = json.loads(json.dumps(sbom.sbom("amdvgpud", "3.2", tmp_path / "root", shipped)))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    assert document["components"] == [
        {
            "type": "library",
            "bom-ref": "pkg:pypi/small@1.0",
            "name": "small",
            "version": "1.0",
            "purl": "pkg:pypi/small@1.0",
            "licenses": [{"expression": "MIT"}],
            "hashes": [
                {
                    "alg": "SHA-256",
                    "content": hashlib.sha256(b"wheel").hexdigest(),
                }
            ],
        },
        {
            "type": "library",
            "bom-ref": "usr/lib/amdvgpu/libamdvgpu.so",
            "name": "libamdvgpu.so",
            "version": "3.2",
            "licenses": [{"expression": "Apache-2.0"}],
            "hashes": [
                {
                    "alg": "SHA-256",
                    "content": hashlib.sha256(b"gate").hexdigest(),
                }
            ],
        },
    ]
    assert document == json.loads(json.dumps(sbom.sbom("amdvgpud", "3.2", tmp_path / "root", shipped)))


def test_the_copyright_file_names_holders_and_text(script: Script, tmp_path: Path) -> None:
    sbom = script("sbom")
    distribution(tmp_path / "site-packages", "small", "License: MIT License")
    text = sbom.copyright_file(tmp_path, list(sbom.distributions(tmp_path, tmp_path)))
    assert "Files: /site-packages/small-1.0.dist-info/*\n       /site-packages/small.py\n" in text
    assert "Copyright: 2020 Some Body\nLicense: MIT-of-small\n Copyright (c) 2020 Some Body\n .\n Do what" in text


def test_a_licence_that_nobody_looked_at_stops_the_build(script: Script, tmp_path: Path) -> None:
    distribution(tmp_path / "site-packages", "odd", "License-Expression: AGPL-3.0-only")
    with pytest.raises(SystemExit, match=r"odd 1\.0: licence AGPL-3\.0-only is not among those looked at"):
        list(script("sbom").distributions(tmp_path, tmp_path))
