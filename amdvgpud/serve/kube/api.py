"""The Kubernetes API, as far as this node needs it: seven calls over aiohttp, and a watch that resumes.

Owns credentials (in-cluster or a kubeconfig), retries and their pace, and the few fields that are read of Nodes and
Pods. Decides nothing. The full clients cost some 60 MiB in each daemon; what is used here is below, and so is the RBAC
that it needs (:data:`VERBS`).

Sources: Kubernetes API concepts (watch, resourceVersion, merge patch), kubeconfig v1.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import re
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
from yarl import URL

from amdvgpud.core.errors import HostFailure, Invalid, NotFound, Stale

log = logging.getLogger(__name__)

VERBS: Final[Mapping[str, tuple[str, ...]]] = {
    "nodes": ("get", "patch"),
    "pods": ("get", "list", "watch", "patch"),
    "events": ("create",),
}
"""All that is asked of the API. Events are created in the namespace ``default``, where those about Nodes live."""
AMOUNTS_VERBS: Final[Mapping[str, tuple[str, ...]]] = {"nodes/status": ("patch",)}
"""And with ``hami.amounts``, which is off unless asked for."""

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
EVENTS_NAMESPACE: Final = "default"

TRIES: Final = 4
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 30.0
TOKEN_AGE_S: Final = 60.0
"""A mounted token is renewed by the kubelet long before it ends; reading it once a minute is never too late. The same
goes for what TLS rests on: who rotates an authority trusts the old one for a while. A failure has all looked at anew.
"""
WATCH_S: Final = 120
"""How long one watch is asked to last. A connection that has died without a word is noticed when it is over."""
LONGEST_LINE: Final = 16 * 1024**2
"""Of a watch. An object is at most some 2 MiB, for etcd takes no more."""


# -------------------------------------------------------------------------------------------------- what is read


_WHOLE: Final = re.compile(r"([0-9]{1,19})(?:[eE]([0-9]{1,2})|([kMGTPE]|[KMGTPE]i))?")
_TIMES: Final[Mapping[str, int]] = {
    **{unit: 1000**power for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": 1024**power for power, unit in enumerate("KMGTPE", start=1)},
}


def _whole(quantity: str | int) -> int | None:
    """The number that a quantity is; None: it is none, or not surely a whole one (``1500m``, ``1.5Gi``).

    The API server writes each number in its shortest form, whatever was sent: who asks for 16000 of something is shown
    to ask for ``16k``. Of what is counted it takes whole numbers only, so that fractions never stay fractions there.

    Source: apimachinery's ``resource.Quantity``.
    """
    if (found := _WHOLE.fullmatch(str(quantity))) is None:
        return None
    number, exponent, unit = found.groups()
    return int(number + "0" * int(exponent or 0)) * _TIMES.get(unit, 1)


class Meta(msgspec.Struct, rename="camel", frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class Resources(msgspec.Struct, frozen=True):
    limits: dict[str, str | int] | None = None


class PodContainer(msgspec.Struct, rename="camel", frozen=True):
    name: str = ""
    image: str = ""
    resources: Resources | None = None
    restart_policy: str = ""

    def limit(self, resource: str) -> int | None:
        """The whole number that is its limit of ``resource``; None: none is written, or no whole number."""
        return _whole(((self.resources and self.resources.limits) or {}).get(resource, ""))


class PodSpec(msgspec.Struct, rename="camel", frozen=True):
    node_name: str = ""
    scheduler_name: str = ""
    init_containers: tuple[PodContainer, ...] | None = None
    containers: tuple[PodContainer, ...] | None = None


class Terminated(msgspec.Struct, rename="camel", frozen=True):
    exit_code: int = -1


class ContainerState(msgspec.Struct, frozen=True):
    running: dict[str, Any] | None = None
    terminated: Terminated | None = None


class ContainerStatus(msgspec.Struct, rename="camel", frozen=True):
    name: str = ""
    state: ContainerState = ContainerState()
    restart_count: int = 0


class PodStatus(msgspec.Struct, rename="camel", frozen=True):
    """The kubelet's word: a pod's owner cannot write it."""

    phase: str = ""
    init_container_statuses: tuple[ContainerStatus, ...] | None = None
    container_statuses: tuple[ContainerStatus, ...] | None = None


class Pod(msgspec.Struct, frozen=True):
    metadata: Meta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.metadata.annotations or {}

    @property
    def every_container(self) -> tuple[PodContainer, ...]:
        """Init containers first, which is the order in which the kubelet allocates."""
        return (*(self.spec.init_containers or ()), *(self.spec.containers or ()))

    @property
    def ended(self) -> bool:
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def _every_status(self) -> tuple[ContainerStatus, ...]:
        return (*(self.status.init_container_statuses or ()), *(self.status.container_statuses or ()))

    @property
    def stopped(self) -> bool:
        """Whether no container of it runs, by what the kubelet has said of each."""
        return all(each.state.terminated is not None for each in self._every_status)

    @property
    def begun(self) -> bool:
        """Whether any of its containers has run. A pod is ``Pending`` while its init containers do."""
        return any(
            each.restart_count or each.state.running is not None or each.state.terminated for each in self._every_status
        )

    def runs_first(self, container: PodContainer) -> bool:
        """Whether it is over before the containers behind it start: an init container that is no sidecar."""
        return container.restart_policy != "Always" and any(
            each.name == container.name for each in self.spec.init_containers or ()
        )

    def has_succeeded(self, container: PodContainer) -> bool:
        """Of one that :meth:`runs_first`. The kubelet runs it again only where the pod has lost its sandbox."""
        return any(
            each.name == container.name and each.state.terminated == Terminated(0)
            for each in self.status.init_container_statuses or ()
        )

    def __str__(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"


class NodeInfo(msgspec.Struct, rename="camel", frozen=True):
    kubelet_version: str = ""
    container_runtime_version: str = ""


class NodeStatus(msgspec.Struct, rename="camel", frozen=True):
    capacity: dict[str, str] | None = None
    allocatable: dict[str, str] | None = None
    node_info: NodeInfo = NodeInfo()

    def allocatable_of(self, resource: str) -> int | None:
        """None: the Node has no such resource, or the number is none that counts whole things."""
        return _whole((self.allocatable or {}).get(resource, ""))

    def capacity_of(self, resource: str) -> int | None:
        """As :meth:`allocatable_of`."""
        return _whole((self.capacity or {}).get(resource, ""))


class ClusterNode(msgspec.Struct, frozen=True):
    metadata: Meta
    status: NodeStatus = NodeStatus()

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.metadata.annotations or {}


class _ListMeta(msgspec.Struct, rename="camel", frozen=True):
    resource_version: str = ""


class _PodList(msgspec.Struct, frozen=True):
    metadata: _ListMeta
    items: tuple[Pod, ...] | None = None


class _Status(msgspec.Struct, frozen=True):
    message: str = ""
    reason: str = ""
    code: int = 0


class _Change(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Listed:
    """All pods there are now. What was seen before and is not among them has gone, unseen."""

    pods: tuple[Pod, ...]


@dataclass(frozen=True, slots=True)
class Changed:
    pod: Pod
    deleted: bool


# ---------------------------------------------------------------------------------------------------- credentials


@dataclass(frozen=True, slots=True)
class Access:
    """Where the API is, and as whom to speak."""

    server: str
    tls: ssl.SSLContext | None = None
    """None: plain HTTP, for tests and for proxies on the loopback."""
    token: str | None = None
    token_file: Path | None = None
    """Read anew each minute, for the kubelet renews it."""
    files: tuple[tuple[Path, _Stamp | None], ...] = field(default=(), compare=False)
    """What else this was read from, as it was just before. One that is another now: :attr:`again`."""
    again: Callable[[], Access] | None = field(default=None, compare=False)

    def outdated(self) -> bool:
        return any(_stamp(path) != stamp for path, stamp in self.files)


_Stamp = tuple[int, int, int, int]
"""Device, inode, time of change and size: a mounted secret is replaced by a link, a kubeconfig perhaps in place."""


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _stamped(*paths: Path) -> tuple[tuple[Path, _Stamp | None], ...]:
    """To be taken before reading: what changes meanwhile is then read again."""
    return tuple((path, _stamp(path)) for path in paths)


def read_access(kubeconfig: Path | None, environment: Mapping[str, str], mounted: Path = SERVICE_ACCOUNT) -> Access:
    """From ``kubeconfig`` if one is named, else as a pod's service account. ``Invalid`` says what is missing."""
    access = _from_pod(environment, mounted) if kubeconfig is None else _from_kubeconfig(kubeconfig)
    return replace(access, again=lambda: read_access(kubeconfig, environment, mounted))


def _from_pod(environment: Mapping[str, str], mounted: Path) -> Access:
    host, port = (environment.get(f"KUBERNETES_SERVICE_{what}", "") for what in ("HOST", "PORT"))
    if not host or not (mounted / "token").is_file():
        raise Invalid.field(
            "kube.config",
            "no kubeconfig is named, and this process is in no pod with a service account "
            f"(KUBERNETES_SERVICE_HOST, {mounted}/token): name a kubeconfig",
        )
    files = _stamped(mounted / "ca.crt")
    try:
        tls = _trusting(cafile=str(mounted / "ca.crt"))
    except OSError as error:
        raise Invalid(f"{mounted / 'ca.crt'} cannot be read: {error}") from error
    server = f"https://{f'[{host}]' if ':' in host else host}:{port or 443}"
    return Access(server, tls, token_file=mounted / "token", files=files)


def _trusting(*, cafile: str | None = None, cadata: str | None = None) -> ssl.SSLContext:
    """The library's own checks, but for the letter of RFC 5280, which Python 3.13 asks for and Go's clients do not:
    clusters live for years with authorities that name no key usage, and certificates without their authority's key."""
    context = ssl.create_default_context(cafile=cafile, cadata=cadata)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _from_kubeconfig(path: Path) -> Access:
    try:
        import yaml  # only a node with a kubeconfig needs it
    except ImportError as error:
        raise Invalid.field("kube.config", "reading a kubeconfig needs PyYAML: install amdvgpud[kubernetes]") from error
    files = _stamped(path)
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Invalid.field("kube.config", f"{path} cannot be read: {error}") from error
    config = _Kubeconfig(path, document)
    context = config.named("contexts", "context", config.text(document, "current-context"))
    cluster = config.named("clusters", "cluster", config.text(context, "cluster"))
    user = config.named("users", "user", config.text(context, "user"))
    if unknown := [key for key in ("exec", "auth-provider", "username") if user.get(key)]:
        raise config.wrong(f"its user signs in by {unknown[0]!r}, which is not supported: use a token or certificate")
    server = config.text(cluster, "server").rstrip("/")
    if not server.startswith(("https://", "http://")):
        raise config.wrong(f"its server {server!r} is no http(s) address")
    token_file = user.get("tokenFile")
    named = ((cluster, "certificate-authority"), (user, "client-certificate"), (user, "client-key"))
    files += _stamped(*(config.beside(str(table[key])) for table, key in named if table.get(key)))
    return Access(
        server,
        config.tls(cluster, user) if server.startswith("https://") else None,
        token=None if token_file else (user.get("token") or None),
        token_file=config.beside(str(token_file)) if token_file else None,
        files=files,
    )


@dataclass(frozen=True, slots=True)
class _Kubeconfig:
    path: Path
    document: Any

    def wrong(self, why: str) -> Invalid:
        return Invalid.field("kube.config", f"{self.path}: {why}")

    def beside(self, name: str) -> Path:
        """Relative names are relative to the kubeconfig."""
        return self.path.parent / name

    def text(self, table: object, key: str) -> str:
        value = table.get(key) if isinstance(table, dict) else None
        if not isinstance(value, str) or not value:
            raise self.wrong(f"{key!r} is missing")
        return value

    def named(self, group: str, kind: str, name: str) -> dict[str, Any]:
        entries = self.document.get(group)
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict) and entry.get("name") == name and isinstance(entry.get(kind) or {}, dict):
                return entry.get(kind) or {}
        raise self.wrong(f"there is no {kind} {name!r} in it")

    def tls(self, cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
        try:
            ca = self._bytes(cluster, "certificate-authority")
            context = _trusting(cadata=ca.decode("ascii") if ca else None)
            if cluster.get("insecure-skip-tls-verify"):
                log.warning("%s: the API server is not verified, as insecure-skip-tls-verify asks.", self.path)
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            certificate, key = (self._bytes(user, f"client-{what}") for what in ("certificate", "key"))
            if certificate and key:
                # OpenSSL's loader takes files only; this one is ours alone, and gone at once.
                with tempfile.NamedTemporaryFile() as file:
                    file.write(certificate + b"\n" + key)
                    file.flush()
                    context.load_cert_chain(file.name)
        except (OSError, ValueError) as error:
            raise self.wrong(f"its certificates cannot be used: {error}") from error
        return context

    def _bytes(self, table: Mapping[str, Any], key: str) -> bytes | None:
        if inline := table.get(f"{key}-data"):
            return base64.b64decode(str(inline), validate=True)
        return self.beside(str(table[key])).read_bytes() if table.get(key) else None


# ------------------------------------------------------------------------------------------------------- the calls


class _Gone(Exception):
    """The resourceVersion is too old to resume from."""


class _Unreadable(HostFailure):
    """What came is no object of ours, and would not be one if it came again."""


_T = TypeVar("_T")


def _path_of_pod(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


@dataclass
class KubeApi:
    """One node's view of the API. Reads and merge patches are tried again; both may be done twice without harm."""

    access: Access
    timeout_s: float = 10.0
    """Of one try."""
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    jitter: Callable[[], float] = random.random
    """0 to 1: retries of many nodes must not come in step."""
    clock: Callable[[], float] = time.monotonic
    _session: aiohttp.ClientSession | None = None
    _token: tuple[float, str] | None = field(default=None, repr=False)
    _looked_s: float | None = None
    """When the files behind :attr:`access` were last looked at; None: they are to be before the next question."""
    _said: str = ""

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get_node(self, name: str) -> ClusterNode:
        return _decoded(await self._ask("GET", f"/api/v1/nodes/{name}"), ClusterNode)

    async def patch_node(
        self,
        name: str,
        *,
        annotations: Mapping[str, str | None] | None = None,
        labels: Mapping[str, str | None] | None = None,
        resource_version: str | None = None,
    ) -> ClusterNode:
        """Set what has a value, remove what has None, leave the rest. ``Stale`` unless the Node is at that version."""
        patch = _metadata(annotations, labels, resource_version)
        return _decoded(await self._ask("PATCH", f"/api/v1/nodes/{name}", patch), ClusterNode)

    async def patch_capacity(self, name: str, capacity: Mapping[str, str | None]) -> ClusterNode:
        """Set what has a value in the capacity of the Node's status, remove what has None, leave the rest."""
        patch = {"status": {"capacity": dict(capacity)}}
        return _decoded(await self._ask("PATCH", f"/api/v1/nodes/{name}/status", patch), ClusterNode)

    async def get_pod(self, namespace: str, name: str) -> Pod:
        return _decoded(await self._ask("GET", _path_of_pod(namespace, name)), Pod)

    async def list_pods(self, node: str) -> tuple[Pod, ...]:
        """The pods that are bound to ``node``, in no order to rely on."""
        return (await self._list_pods(node)).items or ()

    async def patch_pod(self, pod: Pod, annotations: Mapping[str, str | None]) -> Pod:
        """As :meth:`patch_node`. ``Stale`` if another pod of that name has taken its place."""
        patch = _metadata(annotations, None, None)
        patch["metadata"]["uid"] = pod.metadata.uid  # a pod's uid cannot be changed: one that differs is refused
        path = _path_of_pod(pod.metadata.namespace, pod.metadata.name)
        try:
            return _decoded(await self._ask("PATCH", path, patch), Pod)
        except Invalid as error:
            raise Stale(str(error)) from error

    async def tell_of_node(self, node: str, reason: str, message: str, *, warning: bool, now_s: float) -> None:
        """An Event about ``node``, for people: where it cannot be written the caller goes on."""
        at = datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{node}.", "namespace": EVENTS_NAMESPACE},
            "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
            "reason": reason,
            "message": message[:1024],
            "type": "Warning" if warning else "Normal",
            "source": {"component": "amdvgpud", "host": node},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        await self._ask("POST", f"/api/v1/namespaces/{EVENTS_NAMESPACE}/events", event, tries=1)

    async def watch_pods(self, node: str) -> AsyncIterator[Listed | Changed]:
        """The pods of ``node``, for ever: first all of them, then each change; all of them again after a gap.

        Never raises for what the API does: a failure is logged once and tried again, ever slower, up to half a minute.
        """
        version: str | None = None
        failures = 0
        while True:
            try:
                if version is None:
                    found = await self._list_pods(node)
                    version = found.metadata.resource_version
                    yield Listed(found.items or ())
                async for change in self._changes(node, version):
                    failures = 0
                    version = change.metadata.resource_version or version
                    if change.kind != "BOOKMARK":
                        yield Changed(change.pod, change.kind == "DELETED")
                continue
            except _Gone:
                version = None
                reason = "the API keeps no changes that old"
            except (HostFailure, NotFound, Stale) as error:
                if isinstance(error, _Unreadable):
                    version = None  # resumed there, the watch would meet it again, for ever
                reason = str(error)
            failures += 1
            if failures > 1 or version is not None:
                log.log(
                    logging.WARNING if failures == 2 else logging.DEBUG,
                    "The watch of this node's pods broke (%d in a row) and is begun again: %s",
                    failures,
                    reason,
                )
            await self.pause(self._pause_s(failures - 1))

    # ---------------------------------------------------------------------------------------------------- inside

    async def _list_pods(self, node: str) -> _PodList:
        return _decoded(
            await self._ask("GET", "/api/v1/pods", query={"fieldSelector": f"spec.nodeName={node}"}), _PodList
        )

    async def _changes(self, node: str, version: str) -> AsyncIterator[_Seen]:
        lasting_s = int(WATCH_S * (1 + self.jitter() / 2))
        query = {
            "fieldSelector": f"spec.nodeName={node}",
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(lasting_s),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.timeout_s, sock_read=lasting_s + 30)
        try:
            await self._renew()
            async with self._opened().get(
                self._url("/api/v1/pods", query), ssl=self._tls, headers=await self._headers(), timeout=timeout
            ) as response:
                if response.status != 200:
                    self._doubt(response.status)
                    raise _refusal("GET", "/api/v1/pods", response.status, await response.read())
                buffer = bytearray()
                async for chunk in response.content.iter_any():
                    buffer += chunk
                    *lines, rest = buffer.split(b"\n")
                    buffer = rest
                    if len(buffer) > LONGEST_LINE:
                        raise _Unreadable("the API sent a change that is longer than any object can be")
                    for line in filter(None, lines):
                        yield _seen(bytes(line))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._doubt()
            raise HostFailure(f"watching pods: {_said(error)}") from error

    async def _ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, str] | None = None,
        tries: int = TRIES,
    ) -> bytes:
        """The answer's body. Tried again where the API is not there, is busy or ails; never where it refuses."""
        for attempt in range(tries):
            wait_s = self._pause_s(attempt)
            try:
                await self._renew()
                async with self._opened().request(
                    method,
                    self._url(path, query),
                    ssl=self._tls,
                    data=None if body is None else msgspec.json.encode(body),
                    headers={**await self._headers(), **({} if body is None else _CONTENT[method])},
                    timeout=aiohttp.ClientTimeout(total=self.timeout_s),
                ) as response:
                    text = await response.read()
                    if response.status < 300:
                        return text
                    failure: Exception = _refusal(method, path, response.status, text)
                    self._doubt(response.status)
                    if response.status < 500 and response.status not in (401, 429):
                        raise failure
                    after = response.headers.get("Retry-After", "")
                    wait_s = max(wait_s, min(float(after), 5.0)) if after.isdigit() else wait_s
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._doubt()
                failure = HostFailure(f"{method} {path}: {_said(error)}")
                failure.__cause__ = error
            if attempt + 1 < tries:
                await self.pause(wait_s)
        raise failure

    def _pause_s(self, failures: int) -> float:
        return float(min(FIRST_PAUSE_S * 2**failures, LONGEST_PAUSE_S) * (0.5 + self.jitter() / 2))

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No proxy, no cookies, no redirects to elsewhere: it is one server, with our token.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=8),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": "amdvgpud", "Accept": "application/json"},
            )
        return self._session

    @property
    def _tls(self) -> ssl.SSLContext | bool:
        """Given with each question: connections of an earlier context are not used again, and close by themselves."""
        return self.access.tls if self.access.tls is not None else True

    async def _renew(self) -> None:
        """Read the access anew if a file behind it is another one. What cannot be read (it is being written) changes
        nothing, and is looked at again with the next question that fails, or in a minute."""
        if self._looked_s is not None and self.clock() - self._looked_s <= TOKEN_AGE_S:
            return
        self._looked_s = self.clock()
        if self.access.again is None or not await asyncio.to_thread(self.access.outdated):
            return
        try:
            self.access = await asyncio.to_thread(self.access.again)
        except Invalid as error:
            if str(error) != self._said:
                self._said = str(error)
                log.warning("The access to the Kubernetes API has changed and stays as it was: %s", error)
            return
        self._said, self._token = "", None
        log.info("The access to the Kubernetes API has changed, and was read again.")

    def _url(self, path: str, query: Mapping[str, str] | None) -> URL:
        return URL(self.access.server + path, encoded=False).with_query(query)

    async def _headers(self) -> dict[str, str]:
        token = self.access.token
        if self.access.token_file is not None:
            if self._token is None or self.clock() - self._token[0] > TOKEN_AGE_S:
                self._token = self.clock(), await asyncio.to_thread(_read_token, self.access.token_file)
            token = self._token[1]
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _doubt(self, status: int = 401) -> None:
        """After a refusal of who we are, or no answer at all: the next question is asked with what the files say."""
        if status == 401:
            self._token = self._looked_s = None


_CONTENT: Final = {
    "PATCH": {"Content-Type": "application/merge-patch+json"},
    "POST": {"Content-Type": "application/json"},
}


def _read_token(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise HostFailure(f"the token of the Kubernetes API cannot be read: {error}") from error


def _metadata(
    annotations: Mapping[str, str | None] | None, labels: Mapping[str, str | None] | None, version: str | None
) -> dict[str, dict[str, object]]:
    fields: dict[str, object] = {}
    if annotations is not None:
        fields["annotations"] = dict(annotations)
    if labels is not None:
        fields["labels"] = dict(labels)
    if version is not None:
        fields["resourceVersion"] = version
    return {"metadata": fields}


@dataclass(frozen=True, slots=True)
class _Seen:
    kind: str
    pod: Pod

    @property
    def metadata(self) -> Meta:
        return self.pod.metadata


def _seen(line: bytes) -> _Seen:
    change = _decoded(line, _Change)
    if change.type != "ERROR":
        return _Seen(change.type, _decoded(bytes(change.object), Pod))
    status = _decoded(bytes(change.object), _Status)
    if status.code == 410:
        raise _Gone
    raise HostFailure(f"watching pods: {status.message or status.reason or status.code}")


def _refusal(method: str, path: str, status: int, body: bytes) -> Exception:
    try:
        said = msgspec.json.decode(body, type=_Status).message
    except msgspec.MsgspecError:
        said = body[:200].decode("utf-8", "replace")
    text = f"{method} {path}: the API says {status}: {said or 'nothing more'}"
    if status == 404:
        return NotFound(text)
    if status == 409:
        return Stale(text)
    if status == 410:
        return _Gone(text)
    if status == 422:
        return Invalid(text)
    if status == 403:
        text += " (the role that amdvgpud needs is in docs/guide/hami.md)"
    return HostFailure(text)


def _decoded(text: bytes, type_: type[_T]) -> _T:
    try:
        return msgspec.json.decode(text, type=type_)
    except msgspec.MsgspecError as error:
        raise _Unreadable(f"the API sent what is no {type_.__name__.lstrip('_')}: {error}") from error


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
