"""What the tests say to the real kube-apiserver: plain requests with JSON bodies, no client library."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PATIENCE_S: Final = 60.0
"""What is waited for comes within seconds; on a busy machine later. After this it counts as not come."""


class Refused(Exception):
    """The API server's answer was not a success. ``str()`` has method, path, code and its reason."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Api:
    port: int
    ca: Path
    token: str

    def call(self, method: str, path: str, body: Any = None, kind: str = "application/json", text: bool = False) -> Any:
        """The answer as JSON (``text``: as it came). Raises Refused."""
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=30, context=ssl.create_default_context(cafile=str(self.ca))
        )
        try:
            sent = body if isinstance(body, str) or body is None else json.dumps(body)
            headers = {"Authorization": f"Bearer {self.token}", "Content-Type": kind, "Accept": "*/*"}
            connection.request(method, path, sent, headers)
            answer = connection.getresponse()
            said = answer.read().decode()
        finally:
            connection.close()
        if answer.status >= 300:
            raise Refused(answer.status, f"{method} {path}: {answer.status} {said}")
        return said if text else json.loads(said)

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        return self.call("PATCH", path, body, "application/merge-patch+json")

    def apply(self, path: str, body: Mapping[str, Any], *, dry_run: bool = False) -> Any:
        """Server-side apply, strict: an unknown field is refused."""
        query = "?fieldManager=amdvgpud-e2e&fieldValidation=Strict&force=true" + ("&dryRun=All" if dry_run else "")
        return self.call("PATCH", path + query, body, "application/apply-patch+yaml")

    def apply_object(self, item: Mapping[str, Any], *, dry_run: bool = False) -> Any:
        """``apply`` at the path that the object's own kind, name and namespace make."""
        group = "/api/v1" if item["apiVersion"] == "v1" else f"/apis/{item['apiVersion']}"
        inside = (
            "" if item["kind"].startswith("Cluster") else f"/namespaces/{item['metadata'].get('namespace', 'default')}"
        )
        return self.apply(f"{group}{inside}/{item['kind'].lower()}s/{item['metadata']['name']}", item, dry_run=dry_run)

    def node(self, name: str) -> Any:
        return self.get(f"/api/v1/nodes/{name}")

    def pod(self, name: str, namespace: str = "default") -> Any:
        return self.get(f"/api/v1/namespaces/{namespace}/pods/{name}")

    def create_pod(self, pod: Mapping[str, Any]) -> Any:
        return self.call("POST", f"/api/v1/namespaces/{pod['metadata'].get('namespace', 'default')}/pods", pod)

    def delete_pod(self, name: str, namespace: str = "default") -> None:
        self.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}")

    def gone(self, name: str, namespace: str = "default") -> bool:
        try:
            self.pod(name, namespace)
        except Refused as refused:
            if refused.code == 404:
                return True
            raise
        return False


PODS: Final = "/api/v1/namespaces/default/pods"


def eventually(what: str, look: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """The first true answer of ``look()``; fails with ``what`` and the last answer after ``patience_s``.

    An API server that is not there yet (or not any more) is no answer.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        last: Any
        try:
            last = look()
        except (OSError, Refused, http.client.HTTPException) as error:
            last = error
        else:
            if last:
                return last
        assert time.monotonic() < deadline_s, f"waited {patience_s:g} s in vain for {what}: {last!r}"
        time.sleep(0.05)
