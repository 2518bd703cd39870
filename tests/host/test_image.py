"""Looking into bundles on disk: real programs of this machine, and roots that try to lead the look astray."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from amdvgpud.core.image import Verdict
from amdvgpud.host.image import Images, open_inside

GATE = "/usr/lib/amdvgpu/libamdvgpu.so"


def bundle(folder: Path, *argv: str, root: str = "rootfs") -> Path:
    """A bundle in ``folder``, whose root has this machine's bash and a static busybox."""
    binaries = folder / "rootfs/bin"
    binaries.mkdir(parents=True)
    shutil.copy2("/bin/bash", binaries / "bash")
    shutil.copy2(shutil.which("busybox") or "/bin/busybox", binaries / "busybox")
    config = {"root": {"path": root}, "process": {"args": list(argv), "env": ["PATH=/bin"], "cwd": "/"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def look(at: Path) -> Verdict:
    root = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        return Images(GATE).look(root, str(at))
    finally:
        os.close(root)


def test_programs_of_this_machine_and_static_ones_are_told_apart(tmp_path: Path) -> None:
    assert look(bundle(tmp_path / "a", "bash", "-c", "true")) == Verdict(True)
    assert look(bundle(tmp_path / "b", "busybox")).reason == "/bin/busybox is a static program, which loads no library"


def test_a_program_of_musl_is_one_that_reads_no_preload_file(tmp_path: Path) -> None:
    at = bundle(tmp_path, "/bin/hello")
    (tmp_path / "hello.c").write_text("int main(void) { return 0; }")
    subprocess.run(["musl-gcc", "-o", at / "rootfs/bin/hello", tmp_path / "hello.c"], check=True)
    verdict = look(at)
    assert (verdict.fits, verdict.reason.split(",")[0]) == (False, "/bin/hello is a program of musl")


def test_the_root_may_be_an_absolute_path(tmp_path: Path) -> None:
    assert look(bundle(tmp_path, "bash", root=str(tmp_path / "rootfs"))) == Verdict(True)


def test_links_of_an_image_are_followed_inside_it(tmp_path: Path) -> None:
    at = bundle(tmp_path, "/usr/bin/run")
    (at / "rootfs/usr").mkdir()
    (at / "rootfs/usr/bin").symlink_to("/bin")
    (at / "rootfs/bin/run").symlink_to("../../../../../../bin/busybox")
    assert look(at).reason == "/usr/bin/run is a static program, which loads no library"


def test_a_way_of_many_links_ends_where_it_ends_inside_the_root(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_text("found")
    (tmp_path / "a/up").symlink_to("../../../..")
    (tmp_path / "abs").symlink_to("/a//b/./")
    (tmp_path / "round").symlink_to("round")
    before = len(list(Path("/proc/self/fd").iterdir()))
    root = os.open(tmp_path, os.O_PATH)
    for path in ("a/b/file", "/abs/../b/file", "a/up/abs/file", "../../a/b/file", "/a/up/a/up/../abs/file"):
        found = open_inside(root, path)
        assert Path(f"/proc/self/fd/{found}").read_text() == "found", path
        os.close(found)
    refused = {"round": errno.ELOOP, "a/b/file/x": errno.ENOTDIR, "no": errno.ENOENT, "a\0": errno.ENOENT}
    for path, error in refused.items():
        with pytest.raises(OSError) as raised:
            open_inside(root, path)
        assert raised.value.errno == error
    os.close(root)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_nothing_outside_an_image_is_looked_at(tmp_path: Path) -> None:
    at = bundle(tmp_path, "/escape")
    (at / "rootfs/escape").symlink_to(sys.executable if sys.executable.startswith("/usr") else "/usr/bin/env")
    assert look(at) == Verdict(None, "there is no program /escape in its image")


@pytest.mark.timeout(10)
def test_a_pipe_in_place_of_a_program_or_a_config_does_not_hold_us_up(tmp_path: Path) -> None:
    at = bundle(tmp_path, "/pipe")
    os.mkfifo(at / "rootfs/pipe")
    assert look(at).reason == "there is no program /pipe in its image"
    (at / "config.json").unlink()
    os.mkfifo(at / "config.json")
    assert look(at).reason.startswith("its bundle cannot be read")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"root": {"path": "nowhere"}}', "\udcff" * 3])
def test_a_config_that_cannot_be_understood_is_no_verdict(tmp_path: Path, text: str) -> None:
    at = bundle(tmp_path, "bash")
    (at / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    verdict = look(at)
    assert (verdict.fits, verdict.reason[:26]) == (None, "its bundle cannot be read:")
