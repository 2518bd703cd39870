"""Images that the gate cannot get into, refused by real podman's runtime on the daemon's word (images.policy)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import _serve

pytestmark = pytest.mark.podman

STATIC = "localhost/static:1"


@pytest.fixture(scope="module")
def strict(corner: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The daemon as ``served`` has it, with images.policy = refuse."""
    yield from _serve(corner, tmp_path_factory.mktemp("daemon"), "--images-policy", "refuse")


def test_a_static_program_is_refused_with_the_reason_and_a_dynamic_one_starts(strict: Any) -> None:
    refused = strict.corner.container(["alice"], "/bin/cat", "/run/amdvgpu/alice/slice.json", image=STATIC)
    assert refused.code != 0
    assert "slice alice would not be enforced: /bin/cat is a static program, which loads no library" in refused.output
    assert strict.usage("alice")["containers"] == []
    assert strict.corner.container(["alice"], "true").code == 0


def test_an_init_in_front_is_seen_through(strict: Any) -> None:
    static = strict.corner.container(["alice"], "/bin/cat", image=STATIC, options=("--init",))
    assert "/bin/cat is a static program" in static.output
    assert strict.corner.container(["alice"], "true", options=("--init",)).code == 0
