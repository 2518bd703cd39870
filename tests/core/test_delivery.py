"""Which way pods get their slices, by what the cluster node runs."""

from __future__ import annotations

import pytest

from amdvgpud.core.cdi_runtimes import CdiWords, looks_into, words_of
from amdvgpud.core.delivery import Choice, NodeSoftware, choose

FILE = "/etc/containerd/config.toml"
NOTHING = CdiWords(source=FILE, lack=f"there is no {FILE} here")
ON = CdiWords(True, None, FILE)


@pytest.mark.parametrize(
    ("kubelet", "runtime", "words", "way", "reason"),
    [
        ("v1.35.4", "containerd://2.1.3", NOTHING, "cdi", "kubelet v1.35.4 and containerd 2.1.3 resolve CDI names"),
        ("v1.29.0", "containerd://2.0.0", NOTHING, "cdi", "kubelet v1.29.0 and containerd 2.0.0 resolve CDI names"),
        ("v1.30.1+k3s1", "containerd://1.7.24-k3s1", ON, "cdi", f"resolve CDI names, switched on by {FILE}"),
        ("v1.32.0", "cri-o://1.32.1", NOTHING, "cdi", "kubelet v1.32.0 and cri-o 1.32.1 resolve CDI names"),
        ("v1.28.9", "containerd://2.1.3", NOTHING, "nodes", "kubelet v1.28.9 takes no CDI names from device plugins"),
        ("", "containerd://2.1.3", NOTHING, "nodes", "the kubelet's version '' is no version"),
        ("v1.35.4", "containerd://1.6.20~ds1", ON, "nodes", "containerd 1.6.20~ds1 has no CDI: the first with it is"),
        ("v1.35.4", "containerd://1.7.24", NOTHING, "nodes", f"switches it on, and there is no {FILE} here"),
        (
            "v1.35.4",
            "containerd://1.7.24",
            CdiWords(None, None, FILE, f"{FILE} does not"),
            "nodes",
            f"CDI is off in containerd 1.7.24 unless its configuration switches it on, and {FILE} does not",
        ),
        ("v1.35.4", "containerd://2.1.3", CdiWords(False, None, FILE), "nodes", "CDI is switched off in containerd"),
        (
            "v1.35.4",
            "containerd://2.1.3",
            CdiWords(True, ("/srv/cdi",), FILE),
            "nodes",
            f"containerd 2.1.3 does not look for CDI files in /run/cdi, by {FILE}",
        ),
        ("v1.35.4", "containerd://2.1.3", CdiWords(True, ("/var/run/cdi/",), FILE), "cdi", "resolve CDI names"),
        ("v1.35.4", "docker://28.5.2", NOTHING, "nodes", "nobody knows whether docker://28.5.2 resolves CDI names"),
        ("v1.35.4", "", NOTHING, "nodes", "nobody knows whether this runtime resolves CDI names"),
        ("v1.35.4", "containerd://Unknown", ON, "nodes", "'Unknown' is no version of containerd"),
    ],
)
def test_names_are_chosen_only_where_kubelet_and_runtime_are_known_to_resolve_them(
    kubelet: str, runtime: str, words: CdiWords, way: str, reason: str
) -> None:
    choice = choose(NodeSoftware(kubelet, runtime), words, "/run/cdi")
    assert (choice.way, choice.known) == (way, True)
    assert reason in choice.reason


def test_a_file_elsewhere_is_named_only_to_a_runtime_that_is_told_to_look_there() -> None:
    software = NodeSoftware("v1.35.4", "containerd://2.1.3")
    assert choose(software, CdiWords(None, None, FILE), "/srv/cdi") == Choice(
        "nodes", "containerd 2.1.3 does not look for CDI files in /srv/cdi, by its defaults"
    )
    assert choose(software, CdiWords(None, ("/srv/cdi",), FILE), "/srv/cdi").way == "cdi"


def test_what_a_configuration_says_is_found_in_whatever_table_and_the_later_file_wins() -> None:
    main = {"plugins": {"io.containerd.grpc.v1.cri": {"enable_cdi": False, "cdi_spec_dirs": ["/etc/cdi"]}}}
    drop_in = {"plugins": {"io.containerd.cri.v1.runtime": {"enable_cdi": True}}}
    assert words_of([main, drop_in], "x") == CdiWords(True, ("/etc/cdi",), "x")
    assert words_of([{"plugins": {"enable_cdi": "true"}}], "x") == CdiWords(None, None, "x", "x does not")
    assert looks_into(("/var/run/cdi",), "/run/cdi/")
    assert not looks_into((), "/run/cdi")
