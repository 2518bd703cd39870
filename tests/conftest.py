"""What all tests share: where captured trees lie, and which tiers this machine must run.

In CI (``CI=true``) a tier that cannot run is a failure, never a skip: a green run with a tier missing says nothing.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Neither luck nor the clock decides a test: the same examples each time, however long this machine takes over them.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")

FIXTURES = Path(__file__).resolve().parents[2] / "shared" / "fixtures"


def _missing(item: pytest.Item) -> str | None:
    """Why this machine cannot run ``item``, or None."""
    if item.get_closest_marker("fixtures") and not FIXTURES.is_dir():
        return f"the captured trees are not here: {FIXTURES} does not exist"
    root_tiers = [m for m in ("root", "podman") if item.get_closest_marker(m)]
    if root_tiers and os.geteuid() != 0:
        return f"tier {root_tiers[0]!r} needs root: run the tests with sudo"
    if item.get_closest_marker("podman") and shutil.which("podman") is None:
        return "tier 'podman' needs podman: apt-get install podman crun runc"
    if item.get_closest_marker("rocm") and shutil.which("rocminfo") is None:
        return "tier 'rocm' needs the ROCm user space: apt-get install rocminfo libamdhip64-dev"
    if item.get_closest_marker("browser") and not (shutil.which("chromium") and shutil.which("chromedriver")):
        return "tier 'browser' needs a browser: apt-get install chromium chromium-driver (Ubuntu has a snap only)"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := _missing(item):
            if os.environ.get("CI"):
                item.add_marker(pytest.mark.usefixtures("missing_tier"))
                item.user_properties.append(("missing_tier", reason))
            else:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def missing_tier(request: pytest.FixtureRequest) -> None:
    reason = dict(request.node.user_properties)["missing_tier"]
    pytest.fail(f"CI must run every tier: {reason}", pytrace=False)


@pytest.fixture(scope="session")
def captures() -> Path:
    """The folder of captured sysfs trees of real machines (read in place, never committed)."""
    return FIXTURES


@pytest.fixture(scope="session")
def unpacked(captures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two captures that are archives, as trees: ``<folder>/<capture name>/sys``."""
    folder = tmp_path_factory.mktemp("captures")
    for name in ("mi300x-8gpu-cpx", "mi308x-8gpu-cpx"):
        with tarfile.open(captures / name / "tree.tar.xz") as archive:
            # Debian 12's Python 3.11.2 has no filters yet; the archives are the captures', so nobody's surprise.
            if hasattr(tarfile, "data_filter"):
                archive.extraction_filter = tarfile.data_filter
            archive.extractall(folder / name)  # noqa: S202
    return folder
