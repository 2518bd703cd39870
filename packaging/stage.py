"""Lay out what the packages install, once for deb, rpm and container image, and list whose each file is.

    python3 packaging/stage.py --wheels DIR --into DESTDIR --lists DIR

``--wheels`` holds amdvgpud's own wheel and those of ``requirements.lock``. ``--lists`` gets one file a package
(``libamdvgpu``, ``amdvgpuctl``, ``amdvgpud``) with the absolute paths it owns; they are disjoint and cover DESTDIR.

amdvgpuctl and amdvgpud share one virtual environment, /usr/lib/amdvgpud: the client brings it with the libraries that
it needs, the daemon adds its own. Refused: an environment each (7 MB twice, and two versions on one machine).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
HOME = Path("usr/lib/amdvgpud")
GATE_HOME = Path("usr/lib/amdvgpu")
PLATFORMS = {"x86_64": "..", "haswell": "..", "xeon_phi": "..", "i686": "../lib32", "i586": "../lib32"}
"""What a linker may call what it loads ($PLATFORM, see preload_line of amdvgpud.core.render), and where that leads."""
CLIENT_NEEDS = ("cffi", "click", "msgspec", "rich")
"""What ``amdvgpuctl`` imports; with all that these require. tests/packaging runs it without the rest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--wheels", "--into", "--lists"):
        parser.add_argument(name, type=Path, required=True)
    given = parser.parse_args()
    into: Path = given.into.resolve()
    if into.exists():
        shutil.rmtree(into)
    site = into / HOME / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    site.mkdir(parents=True)
    _install(given.wheels, site)
    _make_environment(into)
    _place_libraries(into, site)
    _place_files(into, site)
    given.lists.mkdir(parents=True, exist_ok=True)
    for package, paths in _owners(into, site).items():
        (given.lists / package).write_text("".join(f"/{p.relative_to(into)}\n" for p in sorted(paths)))


def _install(wheels: Path, site: Path) -> None:
    """By this interpreter's pip, from ``wheels`` only, each file checked against the lock's hash."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-compile", "--target", str(site)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_ROOT_USER_ACTION": "ignore", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    lock = REPOSITORY / "packaging/requirements.lock"
    own = sorted(wheels.glob("amdvgpud-*.whl"))
    if len(own) != 1:
        sys.exit(f"{wheels} holds {len(own)} wheels of amdvgpud; one is needed")
    for what in (
        ["--find-links", str(wheels), "--require-hashes", "--only-binary", ":all:", "-r", str(lock)],
        ["--no-deps", str(own[0])],
    ):
        subprocess.run([*pip, *what], check=True, env=environment)
        shutil.rmtree(
            site / "bin"
        )  # command files of others, and ours with the builder's interpreter in its first line
    for path in site.rglob("*"):
        if path.is_file() and site / "amdvgpud" not in path.parents:
            path.chmod(0o644)  # some wheels have executable modules and metadata
    for found in site.glob("*.dist-info"):
        # Of this build, not of what is shipped: paths and the installer's marks.
        for name in ("direct_url.json", "REQUESTED", "INSTALLER"):
            (found / name).unlink(missing_ok=True)
        record = found / "RECORD"
        gone = re.compile(r"^(\.\./.*|.*/(direct_url\.json|REQUESTED|INSTALLER)),.*\n", re.MULTILINE)
        record.write_text(gone.sub("", record.read_text()))


def _make_environment(into: Path) -> None:
    """What ``python -m venv`` makes, without what only people need (activate scripts, pip)."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    home = into / HOME
    (home / "bin").mkdir()
    (home / "bin/python").symlink_to(f"/usr/bin/python{version}")
    (home / "pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {version}\n")
    (into / "usr/bin").mkdir()
    for name, module in (("amdvgpud", "amdvgpud.cli"), ("amdvgpuctl", "amdvgpud.ctl.cli")):
        program = home / "bin" / name
        # -I: neither PYTHONPATH nor a module in the current folder gets into a root process.
        program.write_text(
            f"#!/{HOME}/bin/python -I\nimport sys\n\nfrom {module} import main\n\nsys.exit(main())\n",
        )
        program.chmod(0o755)
        (into / "usr/bin" / name).symlink_to(f"../lib/amdvgpud/bin/{name}")


def _place_libraries(into: Path, site: Path) -> None:
    """The gate, the simulated KFD and the hook, out of the environment: containers and runtimes get them from here,
    whatever the Python."""
    (into / GATE_HOME).mkdir(parents=True)
    for name in ("libamdvgpu.so", "libsoftkfd.so", "amdvgpu-ledger", "amdvgpu-hook"):
        _move_out(into, site, name)
        (into / GATE_HOME / name).chmod(0o644 if name.endswith(".so") else 0o755)
    (into / "usr/bin/amdvgpu-ledger").symlink_to("../lib/amdvgpu/amdvgpu-ledger")
    if (site / "amdvgpud/lib32").is_dir():  # x86-64: an empty library that stands for both in 32-bit programs
        _move_out(into, site, "lib32")
        (into / GATE_HOME / "lib32/libsoftkfd.so").symlink_to("libamdvgpu.so")
        (into / GATE_HOME / "platform").mkdir()
        for name, target_folder in PLATFORMS.items():
            (into / GATE_HOME / "platform" / name).symlink_to(target_folder)


def _move_out(into: Path, site: Path, name: str) -> None:
    inside = site / "amdvgpud" / name
    inside.rename(into / GATE_HOME / name)
    inside.symlink_to(Path(*[".."] * len(inside.parent.relative_to(into).parts)) / GATE_HOME / name)


def _place_files(into: Path, site: Path) -> None:
    units = into / "usr/lib/systemd/system"
    share = into / "usr/share/amdvgpud/systemd"
    source = REPOSITORY / "systemd"
    for path in sorted(source.iterdir()):
        if path.suffix in (".service", ".socket", ".mount"):
            _copy(path, units / path.name)
    _copy(source / "sysusers.conf", into / "usr/lib/sysusers.d/amdvgpud.conf")
    _copy(source / "preset", into / "usr/lib/systemd/system-preset/90-amdvgpud.preset")
    _copy(source / "tmpfiles.conf", into / "usr/lib/tmpfiles.d/amdvgpud.conf")
    _copy(source / "udev.rules", into / "usr/lib/udev/rules.d/70-amdvgpud.rules")
    for folder in ("drop-ins", "unprivileged"):
        for path in sorted((source / folder).iterdir()):
            _copy(path, share / ("" if folder == "drop-ins" else folder) / path.name)
    target = into / "etc/amdvgpud/amdvgpud.toml"
    target.parent.mkdir(parents=True)
    with target.open("wb") as file:
        subprocess.run([sys.executable, str(REPOSITORY / "packaging/conffile.py")], stdout=file, check=True)
    for page in sorted((REPOSITORY / "packaging/man").glob("*.[1-9]")):
        _copy(page, into / f"usr/share/man/man{page.suffix[1:]}" / page.name)
    for folder, wanted in (
        ("packaging/grafana", "*.json"),
        ("packaging/prometheus", "amdvgpud*.yml"),
        ("docs/guide/slurm", "*"),
    ):
        for path in sorted((REPOSITORY / folder).glob(wanted)):
            _copy(path, into / "usr/share/amdvgpud" / Path(folder).name / path.name)
    # By the click that is shipped: its scripts and the program's answers must fit.
    build = [sys.executable, str(REPOSITORY / "packaging/completions/build.py"), str(into / "usr/share")]
    subprocess.run(build, check=True, env={**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"})


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755 if source.read_bytes().startswith(b"#!") else 0o644)


def _owners(into: Path, site: Path) -> dict[str, list[Path]]:
    client = set(_files_of(site, _closure(site, CLIENT_NEEDS))) | set(_files_of(site, {"amdvgpud"}))
    client |= {into / HOME / "pyvenv.cfg", into / HOME / "bin/python", into / GATE_HOME / "libsoftkfd.so"}
    owners: dict[str, list[Path]] = {"libamdvgpu": [], "amdvgpuctl": [], "amdvgpud": []}
    for path in into.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            continue
        of_the_gate = into / GATE_HOME in path.parents or path == into / "usr/bin/amdvgpu-ledger"
        if of_the_gate and path not in client:
            owners["libamdvgpu"].append(path)
        elif path in client or path.name in ("amdvgpuctl", "_amdvgpuctl", "amdvgpuctl.fish", "amdvgpuctl.1"):
            owners["amdvgpuctl"].append(path)
        else:
            owners["amdvgpud"].append(path)
    return owners


def _closure(site: Path, names: Iterable[str]) -> set[str]:
    """``names`` and what they require, as far as it was installed (markers have been judged by pip already)."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = _plain(waiting.pop())
        if name not in found and _metadata(site, name) is not None:
            found.add(name)
            waiting += _requirements(site, name)
    return found


def _requirements(site: Path, name: str) -> Iterator[str]:
    metadata = _metadata(site, name) or Message()
    for line in metadata.get_all("Requires-Dist") or ():
        if "extra ==" not in line and (match := re.match(r"[A-Za-z0-9._-]+", line)):
            yield match.group()


def _metadata(site: Path, name: str) -> Message | None:
    for found in site.glob("*.dist-info"):
        if _plain(found.name.split("-")[0]) == name:
            return HeaderParser().parsestr((found / "METADATA").read_text("utf-8"))
    return None


def _files_of(site: Path, names: set[str]) -> Iterator[Path]:
    for found in site.glob("*.dist-info"):
        if _plain(found.name.split("-")[0]) in names:
            for line in (found / "RECORD").read_text("utf-8").splitlines():
                yield site / line.rsplit(",", 2)[0].strip('"')


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
