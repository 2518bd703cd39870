"""The manifests and the examples as the real API server takes them, each field checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.e2e.k8s.api import Api, Refused
from tests.e2e.k8s.cluster import NODE, Cluster

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

KUBERNETES: Final = Path(__file__).resolve().parents[3] / "packaging/kubernetes"
FILES: Final = (KUBERNETES / "amdvgpud.yaml", *sorted((KUBERNETES / "examples").iterdir()))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_api_server_takes_them(cluster: Cluster, file: Path) -> None:
    for item in yaml.safe_load_all(file.read_text()):
        taken = cluster.api.apply_object(item, dry_run=True)
        assert taken["metadata"]["name"] == item["metadata"]["name"]


@pytest.mark.parametrize(
    ("verb", "resource", "allowed"),
    [
        ("get", "nodes", True),
        ("patch", "nodes", True),
        ("list", "pods", True),
        ("watch", "pods", True),
        ("patch", "pods", True),
        ("create", "events", True),
        ("delete", "pods", False),
        ("create", "pods", False),
        ("update", "nodes", False),
        ("get", "secrets", False),
        ("create", "serviceaccounts/token", False),
    ],
)
def test_the_account_may_do_what_the_daemon_does_and_no_more(
    account: Api, verb: str, resource: str, allowed: bool
) -> None:
    name, _, part = resource.partition("/")
    asked = {"verb": verb, "resource": name, "subresource": part, "name": NODE if name == "nodes" else "any"}
    review = {"spec": {"resourceAttributes": asked | {"namespace": "" if name == "nodes" else "default"}}}
    answer: Any = account.call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    assert answer["status"]["allowed"] is allowed


def test_the_account_is_refused_in_fact(account: Api) -> None:
    with pytest.raises(Refused, match="403"):
        account.get("/api/v1/secrets")
