"""What is read of a container runtime's own configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from amdvgpud.core.cdi_runtimes import CdiWords
from amdvgpud.host.runtime_config import read_cdi_words

CRI = '[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = {}\n'


def write(root: Path, path: str, text: str) -> Path:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("version", "path"),
    [
        ("1.7.24", "/etc/containerd/config.toml"),
        ("1.7.24-k3s1", "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"),
        ("2.0.4-rke2r1", "/var/lib/rancher/rke2/agent/etc/containerd/config.toml"),
    ],
)
def test_containerd_is_read_where_its_distribution_has_its_file(version: str, path: str, tmp_path: Path) -> None:
    for other in ("/etc/containerd/config.toml", "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"):
        write(tmp_path, other, CRI.format("false"))
    file = write(tmp_path, path, CRI.format("true"))
    assert read_cdi_words("containerd", version, None, tmp_path) == CdiWords(True, None, str(file))


def test_what_it_imports_comes_after_it(tmp_path: Path) -> None:
    file = write(
        tmp_path, "etc/containerd/config.toml", 'imports = ["conf.d/*.toml", "/opt/x.toml"]\n' + CRI.format("true")
    )
    write(tmp_path, "etc/containerd/conf.d/a.toml", CRI.format("false"))
    assert read_cdi_words("containerd", "1.7.24", None, tmp_path).enabled is False
    write(tmp_path, "opt/x.toml", CRI.format("true") + 'cdi_spec_dirs = ["/srv/cdi"]\n')
    assert read_cdi_words("containerd", "1.7.24", None, tmp_path) == CdiWords(True, ("/srv/cdi",), str(file))


def test_cri_o_has_a_folder_beside_its_file(tmp_path: Path) -> None:
    write(tmp_path, "etc/crio/crio.conf", '[crio.runtime]\ncdi_spec_dirs = ["/etc/cdi"]\n')
    write(tmp_path, "etc/crio/crio.conf.d/10-cdi.conf", '[crio.runtime]\ncdi_spec_dirs = ["/srv/cdi"]\n')
    assert read_cdi_words("cri-o", "1.32.1", None, tmp_path).dirs == ("/srv/cdi",)


def test_a_file_that_is_named_is_read_instead(tmp_path: Path) -> None:
    write(tmp_path, "etc/containerd/config.toml", CRI.format("false"))
    write(tmp_path, "srv/c.toml", CRI.format("true"))
    assert read_cdi_words("containerd", "1.7.24", Path("/srv/c.toml"), tmp_path).enabled is True


@pytest.mark.parametrize(
    "text", ["enable_cdi = ", 'imports = "a"\n[[plugins]]\n\nx', "imports = 5\n", "imports = [5]\n"]
)
def test_what_cannot_be_read_says_nothing_but_why(text: str, tmp_path: Path) -> None:
    file = write(tmp_path, "etc/containerd/config.toml", text)
    words = read_cdi_words("containerd", "1.7.24", None, tmp_path)
    assert (words.enabled, words.dirs) == (None, None)
    assert words.lack.startswith(f"{file} cannot be read: ")


def test_a_file_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    words = read_cdi_words("containerd", "1.7.24", None, tmp_path)
    assert words == CdiWords(
        source=f"{tmp_path}/etc/containerd/config.toml",
        lack=f"there is no {tmp_path}/etc/containerd/config.toml here",
    )
