"""Which runtime reads which CDI file."""

from __future__ import annotations

import pytest

from amdvgpud.core.cdi_runtimes import missing_access, refusal, to_switch_on, versions_accepted
from amdvgpud.core.errors import Invalid


@pytest.mark.parametrize(
    ("runtime", "version", "newest"),
    [
        ("podman", "3.4.4", ""),
        ("podman", "4.3.1", "0.5.0"),
        ("podman", "4.8.3", "0.5.0"),
        ("podman", "4.9.3", "0.6.0"),
        ("podman", "5.4.2+ds1", "0.8.0"),
        ("podman", "6.1.1", "1.0.0"),
        ("docker", "20.10.24", ""),
        ("docker", "26.1.5+dfsg1", "0.6.0"),
        ("docker", "28.5.2", "1.0.0"),
        ("docker", "29.3.0", "1.1.0"),
        ("containerd", "1.6.20~ds1", ""),
        ("containerd", "v1.7.20", "0.7.0"),
        ("containerd", "2.0.0", "0.8.0"),
        ("containerd", "2.1.9", "1.0.0"),
        ("cri-o", "1.26", "0.5.0"),
        ("cri-o", "1.35.0", "1.1.0"),
    ],
)
def test_a_release_accepts_up_to_the_version_of_the_library_it_was_built_with(
    runtime: str, version: str, newest: str
) -> None:
    assert versions_accepted(runtime, version) == newest


def test_a_file_that_is_too_new_is_refused_with_both_versions_named() -> None:
    assert refusal("podman", "4.3.1", "0.5.0", "/run/cdi") is None
    assert (
        refusal("podman", "4.3.1", "0.6.0", "/run/cdi")
        == "podman 4.3.1 accepts CDI files up to 0.5.0, this one declares 0.6.0"
    )


def test_versions_are_compared_as_numbers_and_not_as_text() -> None:
    assert refusal("cri-o", "1.4.0", "0.5.0", "/run/cdi") == "cri-o 1.4.0 has no CDI: the first with it is 1.26.0"
    assert refusal("docker", "29.10.0", "1.1.0", "/run/cdi") is None


def test_a_directory_of_ones_own_is_out_of_reach_for_a_runtime_without_a_setting_for_it() -> None:
    assert (
        refusal("podman", "5.4.2", "0.5.0", "/srv/cdi")
        == "podman 5.4.2 reads /etc/cdi and /var/run/cdi only, not /srv/cdi"
    )
    assert refusal("podman", "5.5.0", "0.5.0", "/srv/cdi") is None
    assert to_switch_on("podman", "5.5.0", "/srv/cdi") == ("/srv/cdi among --cdi-spec-dir",)


def test_what_must_be_switched_on_is_named() -> None:
    assert to_switch_on("docker", "26.1.5", "/run/cdi/") == ('"features": {"cdi": true} in /etc/docker/daemon.json',)
    assert to_switch_on("docker", "28.2.0", "/run/cdi") == ()
    assert to_switch_on("podman", "4.3.1", "/etc/cdi") == ()


@pytest.mark.parametrize("version", ["", "latest", "4", "-4.3"])
def test_a_text_that_is_no_version_is_an_error(version: str) -> None:
    with pytest.raises(Invalid, match="is no version of podman"):
        versions_accepted("podman", version)


def test_an_unknown_runtime_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(Invalid, match="'rkt' is not known here: one of podman, docker, containerd, cri-o"):
        versions_accepted("rkt", "1.0")


def test_a_cdi_version_that_is_none_is_an_error() -> None:
    with pytest.raises(Invalid, match=r"'0\.5' is no CDI version"):
        refusal("podman", "4.3.1", "0.5", "/run/cdi")


@pytest.mark.parametrize(
    ("mode", "uid", "groups", "selinux", "says"),
    [
        (0o660, 0, [], False, []),
        (0o666, 1000, [], False, []),
        (0o660, 1000, [1000], False, ["user 1000 is not in group render (992) of /dev/kfd"]),
        (0o660, 1000, [1000, 992], False, ["a rootless container loses group render (992) of /dev/kfd"]),
        (0o600, 1000, [992], False, ["/dev/kfd has mode 0600: nobody but its owner"]),
        (0o660, 0, [], True, ["SELinux enforces"]),
        (0o660, 1000, [], True, ["user 1000 is not in group", "SELinux enforces"]),
    ],
)
def test_what_keeps_a_users_containers_from_a_node_is_named(
    mode: int, uid: int, groups: list[int], selinux: bool, says: list[str]
) -> None:
    found = missing_access("/dev/kfd", mode, (992, "render"), uid=uid, groups=groups, selinux_enforces=selinux)
    assert [sentence.startswith(start) for sentence, start in zip(found, says, strict=True)] == [True] * len(says)
