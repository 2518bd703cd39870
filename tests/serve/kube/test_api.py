"""The client of the Kubernetes API, against an API server in memory."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from amdvgpud.core.errors import HostFailure, Invalid, NotFound, Stale
from amdvgpud.serve.kube.api import (
    TRIES,
    Access,
    Changed,
    KubeApi,
    Listed,
    NodeStatus,
    PodContainer,
    Resources,
    read_access,
)
from tests.serve.kube.fake_kubeapi import FakeKubeApi, Json, failing


def a_pod(name: str, node: str = "n1", **annotations: str) -> Json:
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "annotations": annotations},
        "spec": {
            "nodeName": node,
            "containers": [{"name": "c", "image": "none", "resources": {"limits": {"amd.com/gpu": "1"}}}],
        },
        "status": {"phase": "Pending"},
    }


@pytest.fixture
async def server() -> AsyncIterator[FakeKubeApi]:
    fake = FakeKubeApi()
    fake.add_node("n1", here="yes")
    yield fake
    await fake.stop()


class Paused:
    """A pause that waits for nothing, and remembers for how long it would have."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.waits.append(round(seconds, 3))
        await asyncio.sleep(0)


@pytest.fixture
def paused() -> Paused:
    return Paused()


@pytest.fixture
async def api(server: FakeKubeApi, paused: Paused) -> AsyncIterator[KubeApi]:
    client = KubeApi(Access(await server.start()), timeout_s=2, pause=paused, jitter=lambda: 1.0)
    yield client
    await client.close()


async def test_a_node_is_read_and_its_annotations_are_set_and_removed(server: FakeKubeApi, api: KubeApi) -> None:
    node = await api.get_node("n1")
    assert node.annotations == {"here": "yes"}
    after = await api.patch_node("n1", annotations={"here": None, "x": "1"}, labels={"l": "2"})
    assert (after.annotations, after.metadata.labels) == ({"x": "1"}, {"l": "2"})
    assert server.annotations("node", "n1") == {"x": "1"}


async def test_a_patch_of_another_version_is_stale_and_changes_nothing(server: FakeKubeApi, api: KubeApi) -> None:
    old = (await api.get_node("n1")).metadata.resource_version
    server.change_node("n1", {"metadata": {"annotations": {"other": "was here"}}})
    with pytest.raises(Stale, match="409"):
        await api.patch_node("n1", annotations={"here": None}, resource_version=old)
    assert server.annotations("node", "n1") == {"here": "yes", "other": "was here"}


async def test_pods_are_those_of_the_node(server: FakeKubeApi, api: KubeApi) -> None:
    server.add_pod(a_pod("mine"))
    server.add_pod(a_pod("elsewhere", node="n2"))
    assert [str(pod) for pod in await api.list_pods("n1")] == ["default/mine"]
    pod = await api.get_pod("default", "mine")
    assert pod.spec.containers is not None
    assert pod.spec.containers[0].limit("amd.com/gpu") == 1
    assert pod.spec.containers[0].limit("amd.com/gpumem") is None


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("0", 0),
        ("16384", 16384),
        (4, 4),
        ("16k", 16_000),
        ("2M", 2_000_000),
        ("1G", 10**9),
        ("1T", 10**12),
        ("1Ki", 1024),
        ("48Mi", 48 << 20),
        ("3Gi", 3 << 30),
        ("1Ti", 1 << 40),
        ("16e3", 16_000),
        *((text, None) for text in ("", "1500m", "1.5Gi", "-1", "16K", "16kk", "1ki", "k", "\u0663", "9" * 5000)),
    ],
)
def test_a_quantity_is_the_whole_number_that_it_is_or_none(written: str | int, number: int | None) -> None:
    container = PodContainer(resources=Resources(limits={"amd.com/gpumem": written}))
    assert container.limit("amd.com/gpumem") == number
    status = NodeStatus(capacity={"amd.com/gpumem": str(written)}, allocatable={"amd.com/gpumem": str(written)})
    assert (status.capacity_of("amd.com/gpumem"), status.allocatable_of("amd.com/gpumem")) == (number, number)


async def test_a_pod_that_took_anothers_name_is_not_patched(server: FakeKubeApi, api: KubeApi) -> None:
    server.add_pod(a_pod("p"))
    pod = await api.get_pod("default", "p")
    assert (await api.patch_pod(pod, {"a": "1"})).annotations == {"a": "1"}
    server.delete_pod("default", "p")
    server.add_pod({**a_pod("p"), "metadata": {"name": "p", "namespace": "default", "uid": "another"}})
    with pytest.raises(Stale):
        await api.patch_pod(pod, {"a": "2"})
    assert server.annotations("pod", "default", "p") == {}


async def test_what_is_not_there_is_not_found_at_the_first_try(server: FakeKubeApi, api: KubeApi) -> None:
    with pytest.raises(NotFound, match="404"):
        await api.get_pod("default", "gone")
    assert server.asked == ["GET pods"]


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
async def test_an_api_that_ails_is_asked_again(server: FakeKubeApi, api: KubeApi, paused: Paused, code: int) -> None:
    server.faults = [("GET", "nodes", failing(code))] * (TRIES - 1)
    assert (await api.get_node("n1")).metadata.name == "n1"
    assert paused.waits == [0.1, 0.2, 0.4]


async def test_an_api_that_goes_on_ailing_is_a_failure(server: FakeKubeApi, api: KubeApi) -> None:
    server.faults = [("GET", "nodes", failing(503))] * TRIES
    with pytest.raises(HostFailure, match="GET /api/v1/nodes/n1: the API says 503: told to say 503"):
        await api.get_node("n1")


async def test_an_api_that_names_a_wait_is_given_it(server: FakeKubeApi, api: KubeApi, paused: Paused) -> None:
    server.faults = [("GET", "nodes", failing(429, **{"Retry-After": "2"}))]
    await api.get_node("n1")
    assert paused.waits == [2.0]


async def test_an_api_that_hangs_is_given_up_and_asked_again(server: FakeKubeApi, api: KubeApi) -> None:
    async def hang(_: web.Request) -> None:
        await asyncio.sleep(30)

    api.timeout_s = 0.1
    server.faults = [("GET", "nodes", hang)]
    assert (await api.get_node("n1")).metadata.name == "n1"


async def test_an_api_that_is_not_there_is_a_failure() -> None:
    api = KubeApi(Access("http://127.0.0.1:9"), pause=Paused())
    with pytest.raises(HostFailure, match="GET /api/v1/nodes/n1: "):
        await api.get_node("n1")
    await api.close()


async def test_what_the_role_does_not_allow_is_refused_with_where_it_is(server: FakeKubeApi, api: KubeApi) -> None:
    server.faults = [("PATCH", "nodes", failing(403))]
    with pytest.raises(HostFailure, match=r"403.*docs/guide/hami\.md"):
        await api.patch_node("n1", annotations={})


async def test_an_answer_that_is_nothing_known_is_a_failure(server: FakeKubeApi, api: KubeApi) -> None:
    async def nonsense(_: web.Request) -> web.Response:
        return web.Response(text="<html>a proxy</html>")

    server.faults = [("GET", "nodes", nonsense)]
    with pytest.raises(HostFailure, match="no ClusterNode"):
        await api.get_node("n1")


async def test_an_event_about_the_node_is_written(server: FakeKubeApi, api: KubeApi) -> None:
    await api.tell_of_node("n1", "AMDGPUUnhealthy", "GPU-1: ras", warning=True, now_s=1767225600)
    assert server.events == [
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": "n1.", "namespace": "default"},
            "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "n1"},
            "reason": "AMDGPUUnhealthy",
            "message": "GPU-1: ras",
            "type": "Warning",
            "source": {"component": "amdvgpud", "host": "n1"},
            "firstTimestamp": "2026-01-01T00:00:00Z",
            "lastTimestamp": "2026-01-01T00:00:00Z",
            "count": 1,
        }
    ]


# ------------------------------------------------------------------------------------------------------------ watch


async def test_a_watch_tells_all_pods_and_then_each_change(server: FakeKubeApi, api: KubeApi) -> None:
    server.add_pod(a_pod("old"))
    watch = api.watch_pods("n1")
    first = await anext(watch)
    assert isinstance(first, Listed)
    assert [pod.metadata.name for pod in first.pods] == ["old"]
    server.add_pod(a_pod("new"))
    server.add_pod(a_pod("elsewhere", node="n2"))
    server.change_pod("default", "new", {"status": {"phase": "Running"}})
    server.delete_pod("default", "old")
    told = [_short(await anext(watch)) for _ in range(4)]
    assert told == ["new Pending", "new Running", "old Pending", "old Pending gone"]
    await watch.aclose()  # type: ignore[attr-defined]


def _short(change: Listed | Changed) -> str:
    assert isinstance(change, Changed)
    return f"{change.pod.metadata.name} {change.pod.status.phase}{' gone' if change.deleted else ''}"


async def test_a_watch_that_is_cut_goes_on_where_it_was(server: FakeKubeApi, api: KubeApi) -> None:
    watch = api.watch_pods("n1")
    assert await anext(watch) == Listed(())
    server.add_pod(a_pod("a"))
    assert _short(await anext(watch)) == "a Pending"
    server.hang_up.set()
    server.add_pod(a_pod("b"))
    assert _short(await anext(watch)) == "b Pending"
    server.add_pod(a_pod("c"))
    assert _short(await anext(watch)) == "c Pending"
    assert server.asked.count("LIST pods") == 1
    await watch.aclose()  # type: ignore[attr-defined]


async def test_a_watch_whose_changes_are_forgotten_tells_all_pods_again(server: FakeKubeApi, api: KubeApi) -> None:
    server.add_pod(a_pod("a"))
    watch = api.watch_pods("n1")
    await anext(watch)
    server.faults = [("WATCH", "pods", failing(410))]
    server.delete_pod("default", "a")
    assert await anext(watch) == Listed(())
    server.forget_changes()  # said in the stream this time
    server.hang_up.set()
    server._wake()
    server.add_pod(a_pod("b"))
    found = await anext(watch)
    while not isinstance(found, Listed):
        found = await anext(watch)
    assert [pod.metadata.name for pod in found.pods] == ["b"]
    await watch.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "nonsense", [{"metadata": 7}, {"metadata": {"annotations": {"a": "x" * 500_000}}}], ids=["odd", "endless"]
)
async def test_a_change_that_cannot_be_read_is_not_asked_for_again(
    server: FakeKubeApi, api: KubeApi, nonsense: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amdvgpud.serve.kube.api.LONGEST_LINE", 10_000)
    server.add_pod(a_pod("a"))
    watch = api.watch_pods("n1")
    await anext(watch)
    server.version += 1
    server._tell("MODIFIED", {**nonsense, "spec": {"nodeName": "n1"}})
    server.delete_pod("default", "a")
    async with asyncio.timeout(10):
        assert await anext(watch) == Listed(())
    server.add_pod(a_pod("b"))
    assert _short(await anext(watch)) == "b Pending"
    await watch.aclose()  # type: ignore[attr-defined]


async def test_a_watch_that_fails_is_begun_again_ever_slower_and_said_once(
    server: FakeKubeApi, api: KubeApi, paused: Paused, caplog: pytest.LogCaptureFixture
) -> None:
    watch = api.watch_pods("n1")
    await anext(watch)
    server.faults = [("WATCH", "pods", failing(500))] * 5
    server.add_pod(a_pod("a"))
    with caplog.at_level(logging.WARNING):
        assert _short(await anext(watch)) == "a Pending"
    assert paused.waits == [0.1, 0.2, 0.4, 0.8, 1.6]
    assert len(caplog.records) == 1
    await watch.aclose()  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------ credentials


async def test_a_token_that_was_renewed_is_read_again(server: FakeKubeApi, tmp_path: Path, paused: Paused) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    server.bearer = "first"
    now = 0.0
    api = KubeApi(Access(await server.start(), token_file=token), pause=paused, clock=lambda: now)
    await api.get_node("n1")
    token.write_text("second\n")
    await api.get_node("n1")  # a minute old at most
    server.bearer = "second"
    await api.get_node("n1")  # refused once, read anew
    assert server.asked.count("UNAUTHORIZED") == 1
    token.write_text("third\n")
    server.bearer = "third"
    now = 61.0
    await api.get_node("n1")
    assert server.asked.count("UNAUTHORIZED") == 1
    await api.close()


async def test_a_token_that_cannot_be_read_is_a_failure(server: FakeKubeApi, tmp_path: Path, paused: Paused) -> None:
    api = KubeApi(Access(await server.start(), token_file=tmp_path / "none"), pause=paused)
    with pytest.raises(HostFailure, match="the token of the Kubernetes API cannot be read"):
        await api.get_node("n1")
    await api.close()


def test_a_process_in_no_pod_without_a_kubeconfig_is_told_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="name a kubeconfig"):
        read_access(None, {}, tmp_path)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _certified(tmp_path_factory.mktemp("certificate"))


def _certified(folder: Path) -> Path:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = "-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout key.pem -out ca.crt"
    subprocess.run([*command.split(), *names.split()], cwd=folder, check=True, capture_output=True)
    return folder


def test_a_service_account_is_found_where_pods_have_it(certificate: Path) -> None:
    (certificate / "token").write_text("t")
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = read_access(None, environment, certificate)
    assert (access.server, access.token, access.token_file) == ("https://[fd00::1]:6443", None, certificate / "token")
    assert access.tls is not None
    assert access.tls.verify_mode is ssl.CERT_REQUIRED


def test_an_authority_that_names_no_key_usage_is_trusted_as_other_clients_do(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = ssl.create_default_context

    def of_python_3_13(**ca: str | None) -> ssl.SSLContext:
        context = usual(**ca)  # type: ignore[arg-type]
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", of_python_3_13)
    (certificate / "token").write_text("t")
    environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1"}
    file = a_kubeconfig(certificate, "server: 'https://127.0.0.1', certificate-authority: ca.crt", "token: t")
    for access in (read_access(None, environment, certificate), read_access(file, {})):
        assert access.tls is not None
        assert not access.tls.verify_flags & ssl.VERIFY_X509_STRICT
        assert access.tls.check_hostname


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
contexts:
- {{name: elsewhere, context: {{cluster: x, user: x}}}}
- {{name: here, context: {{cluster: c, user: u}}}}
clusters:
- {{name: c, cluster: {{{cluster}}}}}
users:
- {{name: u, user: {{{user}}}}}
"""


def a_kubeconfig(folder: Path, cluster: str, user: str) -> Path:
    path = folder / "kubeconfig"
    path.write_text(KUBECONFIG.format(cluster=cluster, user=user))
    return path


async def test_a_kubeconfig_with_certificates_speaks_tls_both_ways(certificate: Path) -> None:
    data = base64.b64encode((certificate / "ca.crt").read_bytes()).decode()
    async with _serving_tls(certificate, mutual=True) as port:
        path = a_kubeconfig(
            certificate,
            f"server: 'https://127.0.0.1:{port}', certificate-authority-data: {data}",
            f"client-certificate-data: {data}, client-key: key.pem",
        )
        api = KubeApi(read_access(path, {}), pause=Paused())
        assert (await api.get_node("n1")).metadata.name == "n1"
        await api.close()
        # Without the cluster's own authority it is a stranger's server.
        api = KubeApi(read_access(a_kubeconfig(certificate, f"server: 'https://127.0.0.1:{port}'", "token: t"), {}))
        api.pause = Paused()
        with pytest.raises(HostFailure, match="certificate"):
            await api.get_node("n1")
        await api.close()


@contextlib.asynccontextmanager
async def _serving_tls(certificate: Path, port: int = 0, *, mutual: bool = False) -> AsyncIterator[int]:
    """An API server that has one Node; its port."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate / "ca.crt", certificate / "key.pem")
    if mutual:
        tls.load_verify_locations(certificate / "ca.crt")
        tls.verify_mode = ssl.CERT_REQUIRED
    app = web.Application()
    app.router.add_get("/api/v1/nodes/n1", _a_node)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls, reuse_address=True)
    await site.start()
    assert site._server is not None
    try:
        yield site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()


async def _a_node(_: web.Request) -> web.Response:
    return web.json_response({"metadata": {"name": "n1"}})


def _as_pod(folder: Path, certificate: Path, port: int) -> KubeApi:
    """As a service account has it: what is mounted is replaced by a link, all files at once."""
    _mount(folder, "first", certificate)
    for name in ("ca.crt", "token"):
        (folder / name).symlink_to(f"..data/{name}")
    environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
    return KubeApi(read_access(None, environment, folder), pause=Paused())


def _mount(folder: Path, version: str, certificate: Path) -> None:
    (folder / version).mkdir()
    (folder / version / "token").write_text("t")
    (folder / version / "ca.crt").write_bytes((certificate / "ca.crt").read_bytes())
    (folder / "..new").symlink_to(version)
    (folder / "..new").rename(folder / "..data")


async def test_an_authority_that_was_replaced_is_read_again_when_the_old_one_fails(
    certificate: Path, tmp_path: Path
) -> None:
    (tmp_path / "another").mkdir()
    another = _certified(tmp_path / "another")
    async with _serving_tls(certificate) as port:
        api = _as_pod(tmp_path, certificate, port)
        await api.get_node("n1")
    async with _serving_tls(another, port):
        with pytest.raises(HostFailure, match="certificate"):
            await api.get_node("n1")
        _mount(tmp_path, "second", another)
        assert (await api.get_node("n1")).metadata.name == "n1"
    await api.close()


async def test_an_authority_that_was_replaced_is_read_again_within_a_minute_although_the_old_one_still_serves(
    certificate: Path, tmp_path: Path
) -> None:
    now = 0.0
    (tmp_path / "another").mkdir()
    async with _serving_tls(certificate) as port:
        api = _as_pod(tmp_path, certificate, port)
        api.clock = lambda: now
        await api.get_node("n1")
        before = api.access.tls
        _mount(tmp_path, "second", _certified(tmp_path / "another"))
        await api.get_node("n1")
        assert api.access.tls is before
        now = 61.0
        with pytest.raises(HostFailure, match="certificate"):
            await api.get_node("n1")
        assert api.access.tls is not before
    await api.close()


async def test_a_kubeconfig_is_read_again_when_it_or_a_file_that_it_names_has_changed(
    certificate: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "another").mkdir()
    another = _certified(tmp_path / "another")
    (tmp_path / "ca.crt").write_bytes((certificate / "ca.crt").read_bytes())
    async with _serving_tls(certificate) as port:
        where = f"server: 'https://127.0.0.1:{port}', certificate-authority: ca.crt"
        api = KubeApi(read_access(a_kubeconfig(tmp_path, where, "token: t"), {}), pause=Paused())
        await api.get_node("n1")
    async with _serving_tls(another, port):
        (tmp_path / "ca.crt").write_text("half of a certif")
        with pytest.raises(HostFailure, match="certificate"):
            await api.get_node("n1")
        (tmp_path / "ca.crt").write_bytes((another / "ca.crt").read_bytes())
        await api.get_node("n1")
        (tmp_path / "ca.crt").unlink()
        a_kubeconfig(tmp_path, f"server: 'https://127.0.0.1:{port}', certificate-authority: another/ca.crt", "token: u")
        api._doubt()
        await api.get_node("n1")
        assert api.access.token == "u"  # noqa: S105
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert warning.startswith("The access to the Kubernetes API has changed and stays as it was: kube.config: ")
    await api.close()


@pytest.mark.parametrize(
    ("cluster", "user", "token", "token_file"),
    [
        ("server: 'http://127.0.0.1:8001'", "token: abc", "abc", None),
        ("server: 'http://127.0.0.1:8001/'", "token: abc, tokenFile: t", None, "t"),
        ("server: 'http://127.0.0.1:8001'", "", None, None),
    ],
)
def test_a_kubeconfig_says_where_and_as_whom(
    tmp_path: Path, cluster: str, user: str, token: str | None, token_file: str | None
) -> None:
    access = read_access(a_kubeconfig(tmp_path, cluster, user), {})
    assert access == Access("http://127.0.0.1:8001", None, token, tmp_path / token_file if token_file else None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'current-context' is missing"),
        ("[", "cannot be read"),
        ("current-context: nowhere", "no context 'nowhere'"),
        (KUBECONFIG.format(cluster="", user=""), "'server' is missing"),
        (KUBECONFIG.format(cluster="server: 'ftp://x'", user=""), "no http"),
        (KUBECONFIG.format(cluster="server: 'https://x'", user="exec: {command: aws}"), "'exec', which is not"),
        (KUBECONFIG.format(cluster="server: 'https://x', certificate-authority-data: '!'", user=""), "certificates"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_says_why(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(Invalid, match=f"{path}.*{why}"):
        read_access(path, {})
