"""A Kubernetes API server as strict as the real one in what amdvgpud asks of it, in memory.

Optimistic resourceVersion, merge patches (null removes), pods by node, watches that resume or say 410, quantities in
their canonical form, and the role: what is not in it is forbidden. It can be told to fail, once each, at named
requests.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from amdvgpud.serve.kube.api import AMOUNTS_VERBS, VERBS

Json = dict[str, Any]
Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


def status(code: int, message: str, reason: str = "") -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
    return web.json_response(body, status=code)


def failing(code: int, **headers: str) -> Fault:
    async def fail(_: web.Request) -> web.StreamResponse:
        response = status(code, f"told to say {code}")
        response.headers.update(headers)
        return response

    return fail


def merged(target: Json, patch: Json) -> Json:
    """RFC 7396."""
    found = dict(target)
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict):
            found[key] = merged(found[key] if isinstance(found.get(key), dict) else {}, value)
        else:
            found[key] = value
    return found


def canonical(amount: str) -> str:
    """A whole number as the real one stores it, whatever was sent: 16000 is 16k. Others stay as they are here."""
    number, unit = amount, ""
    for next_unit in "kMGTPE" if amount.isdigit() else "":
        if number == "0" or not number.endswith("000"):
            break
        number, unit = number[:-3], next_unit
    return number + unit


def stored(item: Json) -> Json:
    """``item`` with its quantities in their canonical form."""
    item = copy.deepcopy(item)
    spec, state = item.get("spec", {}), item.get("status", {})
    containers = (each for part in ("initContainers", "containers") for each in spec.get(part) or ())
    for amounts in (
        *(each.get("resources", {}).get("limits") or {} for each in containers),
        *(state.get(part) or {} for part in ("capacity", "allocatable")),
    ):
        amounts.update({name: canonical(amount) for name, amount in amounts.items()})
    return item


@dataclass
class FakeKubeApi:
    nodes: dict[str, Json] = field(default_factory=dict)
    pods: dict[tuple[str, str], Json] = field(default_factory=dict)
    events: list[Json] = field(default_factory=list)
    bearer: str | None = None
    """What has to be shown; None: nothing."""
    faults: list[tuple[str, str, Fault]] = field(default_factory=list)
    """(method, what the path holds, what happens), each once, the first that fits."""
    asked: list[str] = field(default_factory=list)
    """``GET nodes``, ``WATCH pods``: all that was asked."""
    version: int = 100
    history: list[tuple[int, str, Json]] = field(default_factory=list)
    oldest: int = 0
    """Changes before this one are forgotten."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    hang_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: watches end in the midst."""
    amounts: bool = False
    """Whether the role has what ``hami.amounts`` needs."""
    server: TestServer | None = None

    async def start(self) -> str:
        app = web.Application(client_max_size=4 * 1024**2)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.server = TestServer(app)
        await self.server.start_server()
        return str(self.server.make_url("")).rstrip("/")

    async def stop(self) -> None:
        self.hang_up.set()
        self._wake()
        if self.server is not None:
            await self.server.close()

    # ------------------------------------------------------------------------------ what a scheduler or user does

    def add_node(self, name: str, **annotations: str) -> Json:
        node = {"metadata": {"name": name, "uid": f"uid-of-{name}", "annotations": dict(annotations)}, "status": {}}
        self.nodes[name] = self._stamped(node)
        return self.nodes[name]

    def add_pod(self, pod: Json) -> Json:
        key = pod["metadata"]["namespace"], pod["metadata"]["name"]
        assert key not in self.pods, key
        self.pods[key] = self._stamped(copy.deepcopy(pod))
        self._tell("ADDED", self.pods[key])
        return self.pods[key]

    def change_pod(self, namespace: str, name: str, patch: Json) -> Json:
        self.pods[namespace, name] = self._stamped(merged(self.pods[namespace, name], patch))
        self._tell("MODIFIED", self.pods[namespace, name])
        return self.pods[namespace, name]

    def delete_pod(self, namespace: str, name: str) -> None:
        """Marked first, then gone, as the real one tells it."""
        self.change_pod(namespace, name, {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
        self._tell("DELETED", self._stamped(self.pods.pop((namespace, name))))

    def change_node(self, name: str, patch: Json) -> None:
        self.nodes[name] = self._stamped(merged(self.nodes[name], patch))

    def forget_changes(self) -> None:
        self.version += 1
        self.oldest = self.version

    def annotations(self, kind: str, *key: str) -> dict[str, str]:
        found = self.nodes[key[0]] if kind == "node" else self.pods[key[0], key[1]]
        return dict(found["metadata"].get("annotations") or {})

    # ------------------------------------------------------------------------------------------------ inside

    def _stamped(self, item: Json) -> Json:
        self.version += 1
        return stored({**item, "metadata": {**item["metadata"], "resourceVersion": str(self.version)}})

    def _tell(self, kind: str, item: Json) -> None:
        self.history.append((self.version, kind, copy.deepcopy(item)))
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if self.bearer is not None and request.headers.get("Authorization") != f"Bearer {self.bearer}":
            self.asked.append("UNAUTHORIZED")
            return status(401, "Unauthorized", "Unauthorized")
        resource = next((part for part in reversed(parts) if part in VERBS), "")
        if parts[-1] == "status":
            resource += "/status"
        role = {**VERBS, **(AMOUNTS_VERBS if self.amounts else {})}
        verb = {"GET": "get", "PATCH": "patch", "POST": "create"}.get(request.method, request.method)
        if verb == "get" and parts[-1] == resource:
            verb = "watch" if request.query.get("watch") else "list"
        self.asked.append(f"{verb.upper()} {resource}")
        for i, (method, path, fault) in enumerate(self.faults):
            if method in (request.method, verb.upper()) and path in request.path:
                del self.faults[i]
                if (response := await fault(request)) is not None:
                    return response
                break
        if verb not in role.get(resource, ()):
            return status(403, f"{resource} is forbidden: cannot {verb}", "Forbidden")
        match parts[2:]:
            case ["nodes", name]:
                return await self._one(request, self.nodes, name, but="status")
            case ["nodes", name, "status"]:
                return await self._one(request, self.nodes, name, but="spec")
            case ["namespaces", namespace, "pods", name]:
                return await self._one(request, self.pods, (namespace, name))
            case ["pods"] if verb == "list":
                return web.json_response(
                    {"kind": "PodList", "metadata": {"resourceVersion": str(self.version)}, "items": self._of(request)}
                )
            case ["pods"]:
                return await self._watch(request)
            case ["namespaces", namespace, "events"]:
                event = await request.json()
                assert request.content_type == "application/json"
                if event["metadata"]["namespace"] != namespace or namespace != "default":
                    return status(400, "an event about a Node lives in default", "BadRequest")
                self.events.append(event)
                return web.json_response(event, status=201)
        return status(404, "the server could not find the requested resource", "NotFound")

    async def _one(self, request: web.Request, group: dict[Any, Json], key: Any, *, but: str = "") -> web.Response:
        """``but``: the part that is not to be changed here, and stays without a word."""
        if key not in group:
            return status(404, f"{key} not found", "NotFound")
        if request.method == "PATCH":
            if request.content_type != "application/merge-patch+json":
                return status(415, f"{request.content_type} is no merge patch", "UnsupportedMediaType")
            patch = json.loads(await request.read())
            wanted, there = patch.get("metadata", {}), group[key]["metadata"]
            if wanted.get("resourceVersion", there["resourceVersion"]) != there["resourceVersion"]:
                return status(409, "the object has been modified", "Conflict")
            if wanted.get("uid", there["uid"]) != there["uid"]:
                return status(422, "metadata.uid: field is immutable", "Invalid")
            for value in (wanted.get("annotations") or {}).values():
                assert value is None or isinstance(value, str), "an annotation is a text"
            after = merged(group[key], {part: value for part, value in patch.items() if part != but})
            if after != group[key]:
                group[key] = self._stamped(after)
                if group is self.pods:
                    self._tell("MODIFIED", group[key])
        return web.json_response(group[key])

    def _of(self, request: web.Request) -> list[Json]:
        wanted = _node_of(request)
        return [pod for pod in self.pods.values() if wanted is None or pod["spec"].get("nodeName") == wanted]

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if seen < self.oldest:
            gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}
            await response.write(json.dumps(gone).encode() + b"\n")
            return response
        wanted = _node_of(request)
        while not self.hang_up.is_set():
            changed = self.changed
            for version, kind, item in [each for each in self.history if each[0] > seen]:
                seen = version
                if wanted is None or item["spec"].get("nodeName") == wanted:
                    line = json.dumps({"type": kind, "object": item}).encode() + b"\n"
                    # In two pieces: a line need not come in one.
                    await response.write(line[:30])
                    await response.write(line[30:])
            await changed.wait()
        self.hang_up.clear()
        return response


def _node_of(request: web.Request) -> str | None:
    selector = request.query.get("fieldSelector")
    if selector is None:
        return None
    key, _, value = selector.partition("=")
    assert key == "spec.nodeName", selector
    return value
