"""The sdist and the wheel: what is in them, and that a stranger's pip makes a working program of the sdist."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("sdist")
    program = "import sys, scikit_build_core.build as b; b.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(to)], cwd=source, check=True, capture_output=True)
    (found,) = to.iterdir()
    return found


@pytest.fixture(scope="module")
def installed(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment after ``pip install`` of the sdist, as a user does it (build isolated, libraries fetched)."""
    home = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    subprocess.run([home / "bin/pip", "install", "--quiet", str(sdist)], check=True, cwd=home)
    return home


def test_the_sdist_holds_the_sources_of_all_that_is_built(sdist: Path, source: Path) -> None:
    with tarfile.open(sdist) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    built_from = [p for folder in ("shim", "softkfd") for p in (source / folder).rglob("*") if p.is_file()]
    wanted = {str(p.relative_to(source)) for p in (*built_from, *(source / "amdvgpud").rglob("*.py"))}
    wanted |= {"CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md", "systemd/amdvgpud.service"}
    assert wanted - names == set()
    assert [n for n in names if n.endswith((".so", ".pyc")) or n.startswith(("build", ".venv"))] == []


def test_a_wheel_holds_the_gate_the_simulated_kfd_and_the_layout(source: Path, tmp_path: Path) -> None:
    argv = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), "."]
    subprocess.run([sys.executable, *argv], cwd=source, check=True)
    (wheel,) = tmp_path.glob("amdvgpud-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    compiled = {name for name in names if name.endswith(".so")}
    assert {"amdvgpud/libamdvgpu.so", "amdvgpud/libsoftkfd.so"} < compiled
    assert [name.split(".")[0] for name in compiled if "_abi" in name] == ["amdvgpud/_abi"]
    assert {p.parts[0] for p in map(Path, names)} == {"amdvgpud", wheel.name.split("-cp")[0] + ".dist-info"}


def test_pip_makes_working_programs_of_the_sdist(installed: Path, tmp_path: Path) -> None:
    """Away from the source, so that nothing is found by chance."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def output(program: str, *argv: str) -> str:
        command = [str(installed / "bin" / program), *argv]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    assert output("amdvgpud", "--version").startswith("amdvgpud, version ")
    assert "mi300x" in output("amdvgpud", "sim", "models")
    assert "Done." in output("amdvgpuctl", "--help")
    folder = "import pathlib, amdvgpud._abi as a; folder = pathlib.Path(a.__file__).parent"
    found = output("python", "-c", f"{folder}; print(*sorted(p.name for p in folder.glob('lib*.so')))")
    assert found == "libamdvgpu.so libsoftkfd.so\n"
