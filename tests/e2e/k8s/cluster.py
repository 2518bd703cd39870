"""One cluster node of real programs: etcd, kube-apiserver, kube-scheduler, containerd, kubelet; in a corner of its own.

What a kubelet needs to work inside another container is done here: cgroup v1, no CAP_SYS_RESOURCE, swap, no network
plugin (so pods have the host's network), no controller manager (so no service accounts are made by themselves).
/var/lib and /var/log are the corner's own, so that kubelet and daemon have their default paths and the machine keeps
nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import tarfile
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from amdvgpud.core import hami
from tests.e2e.conftest import BIN, Corner, Finished
from tests.e2e.k8s.api import Api, eventually

NODE: Final = "node-1"
IMAGE: Final = "docker.io/library/glibc:1"
STATIC: Final = "docker.io/library/static:1"
"""One static program, /bin/cat."""
CONTAINERD: Final = "/run/containerd/containerd.sock"
ACCOUNT: Final = "system:serviceaccount:kube-system:amdvgpud"
"""Whom the daemon speaks as where it runs in a pod."""
ADMIN: Final = "an-administrators-token"
_TOKENS: Final = f"""{ADMIN},admin,admin,"system:masters"
a-kubelets-token,system:node:{NODE},kubelet,"system:nodes"
a-schedulers-token,kube-scheduler,kube-scheduler,"system:masters"
hamis-token,hami-scheduler,hami-scheduler,"system:masters"
"""

_TUNABLES: Final = {"kernel/panic": 10, "kernel/panic_on_oops": 1, "vm/overcommit_memory": 1, "vm/panic_on_oom": 0}
"""Of the kernel, as a kubelet wants them: it would set them for the whole machine. There files say so already."""

_END_CONTAINERS: Final = """
for id; do
  for file in /sys/fs/cgroup/pids/k8s.io/$id/cgroup.procs /sys/fs/cgroup/k8s.io/$id/cgroup.procs; do
    [ ! -e "$file" ] || xargs -r kill -KILL < "$file"
  done
done
sleep 0.2
for id; do find /sys/fs/cgroup/k8s.io/$id /sys/fs/cgroup/*/k8s.io/$id -depth -type d -exec rmdir {} + 2>/dev/null; done
rmdir /sys/fs/cgroup/k8s.io /sys/fs/cgroup/*/k8s.io 2>/dev/null
"""
"""Containers outlive the containerd that started them, and their cgroups the namespaces that they were in. By their
ids: beside them may be those of another cluster on the machine."""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens at; held together, so that they are different."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@dataclass
class Program:
    """A program of the cluster that can be ended and started again; its output is appended to ``log``."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    _running: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        with self.log.open("ab") as out:
            self._running = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(self.environment)
            )

    @property
    def pid(self) -> int:
        """As the machine counts it: the child of the nsenter that went into the corner's pid namespace."""
        assert self._running is not None
        parent = self._running.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return int(children[0]) if children else parent

    def alive(self) -> bool:
        return self._running is not None and self._running.poll() is None

    def end(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        if self._running is not None and self.alive():
            os.kill(self.pid, with_signal)
            self._running.wait(timeout=60)

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Service(Program):
    """A program that :meth:`Corner.command_outside` starts: it is the process itself, whatever children it has."""

    @property
    def pid(self) -> int:
        assert self._running is not None
        return self._running.pid


@dataclass
class Cluster:
    corner: Corner
    bin: Path
    folder: Path
    api: Api
    ports: Mapping[str, int]
    programs: dict[str, Program] = field(default_factory=dict)

    @staticmethod
    def prepare(corner: Corner, bin_folder: Path, folder: Path) -> Cluster:
        ports = dict(zip(("etcd", "peer", "api", "kubelet", "hami", "hami-metrics"), free_ports(6), strict=True))
        for line in (
            "mount -t tmpfs -o mode=755 var-lib /var/lib",
            "mount -t tmpfs -o mode=755 var-log /var/log",
            "mkdir -p /var/lib/kubelet /var/lib/etcd /run/containerd /run/tunables /run/lib/upper /run/lib/work",
            # A daemon in a pod puts the gate there.
            "mount -t overlay lib /usr/lib -o lowerdir=/usr/lib,upperdir=/run/lib/upper,workdir=/run/lib/work",
            # What a pod has from the node as it changes there has to be shared, as systemd makes it.
            "mount --make-rshared /dev",
            "mount -t tmpfs tunables /run/tunables",
            *(
                f"file=/run/tunables/$(basename {at}); echo {value} > $file; mount --bind $file /proc/sys/{at}"
                for at, value in _TUNABLES.items()
            ),
        ):
            done = corner.run("sh", "-ec", line)
            assert done.code == 0, done.output
        certificates(folder)
        (folder / "tokens.csv").write_text(_TOKENS)
        (folder / "tokens.csv").chmod(0o600)
        cluster = Cluster(corner, bin_folder, folder, Api(ports["api"], folder / "ca.crt", ADMIN), ports)
        cluster.kubeconfig("admin", ADMIN)
        cluster.kubeconfig("kubelet", "a-kubelets-token")
        cluster.kubeconfig("kube-scheduler", "a-schedulers-token")
        cluster.kubeconfig("hami-scheduler", "hamis-token")
        return cluster

    def kubeconfig(self, name: str, token: str) -> Path:
        path = self.folder / f"{name}.kubeconfig"
        server = {"server": f"https://127.0.0.1:{self.ports['api']}", "certificate-authority": str(self.api.ca)}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "here", "cluster": server}],
                    "users": [{"name": name, "user": {"token": token}}],
                    "contexts": [{"name": "here", "context": {"cluster": "here", "user": name}}],
                    "current-context": "here",
                }
            )
        )
        path.chmod(0o600)
        return path

    def start(self, name: str, *argv: str, **environment: str) -> Program:
        """A program in the corner, with its own /proc and nothing in its environment but ``environment``."""
        known = {"PATH": f"{self.bin}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        program = Program(name, self.corner.command(*argv), known | environment, self.folder / f"{name}.log")
        self.programs[name] = program
        program.start()
        return program

    def ready(self, name: str, look: Any) -> None:
        def looked() -> Any:
            assert self.programs[name].alive(), f"{name} ended:\n{self.programs[name].tail()}"
            return look()

        try:
            eventually(name, looked)
        except AssertionError as failed:
            raise AssertionError(f"{failed}\n{self.programs[name].tail()}") from None

    def start_etcd(self) -> None:
        url, peer = f"http://127.0.0.1:{self.ports['etcd']}", f"http://127.0.0.1:{self.ports['peer']}"
        self.start(
            "etcd", str(self.bin / "etcd"), "--data-dir=/var/lib/etcd", "--unsafe-no-fsync",
            f"--listen-client-urls={url}", f"--advertise-client-urls={url}", f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}", "--log-level=warn",
        )  # fmt: skip

    def start_apiserver(self) -> None:
        """``audit.log`` in the folder: what schedulers and daemon write to pods and nodes; all that ACCOUNT asks."""
        at = self.folder
        kept: dict[str, Any] = {"level": "Request", "verbs": ["patch", "create"], "omitStages": ["RequestReceived"]}
        kept["resources"] = [{"group": "", "resources": ["nodes", "pods", "pods/binding"]}]
        asked = {"level": "Request", "users": [ACCOUNT], "omitStages": ["RequestReceived"]}
        rules = [{"level": "None", "users": [f"system:node:{NODE}", "admin"]}, asked, kept, {"level": "None"}]
        policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules}
        (at / "audit-policy.json").write_text(json.dumps(policy))
        self.start(
            "kube-apiserver", str(self.bin / "kube-apiserver"), f"--etcd-servers=http://127.0.0.1:{self.ports['etcd']}",
            "--bind-address=127.0.0.1", f"--secure-port={self.ports['api']}", f"--cert-dir={at}",
            f"--tls-cert-file={at}/server.crt", f"--tls-private-key-file={at}/server.key",
            f"--token-auth-file={at}/tokens.csv", "--authorization-mode=Node,RBAC",
            f"--service-account-key-file={at}/accounts.pub", f"--service-account-signing-key-file={at}/accounts.key",
            "--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.0.0.0/24",
            # Without a controller manager nobody makes service accounts, and nobody takes a new node's taint away.
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition", "--endpoint-reconciler-type=none",
            "--allow-privileged", "--profiling=false", f"--audit-policy-file={at}/audit-policy.json",
            f"--audit-log-path={at}/audit.log",
        )  # fmt: skip
        self.ready("kube-apiserver", lambda: self.api.call("GET", "/readyz", text=True) == "ok")

    def start_scheduler(self, extender: Mapping[str, Any] | None = None) -> None:
        """kube-scheduler for pods that name default-scheduler or, with HAMi's ``extender``, hami-scheduler."""
        configuration = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": str(self.folder / "kube-scheduler.kubeconfig")},
            "leaderElection": {"leaderElect": False},
            "podInitialBackoffSeconds": 1,
            "podMaxBackoffSeconds": 2,
            "profiles": [{"schedulerName": "default-scheduler"}, {"schedulerName": "hami-scheduler"}],
            "extenders": [extender] if extender else [],
        }
        (self.folder / "scheduler.json").write_text(json.dumps(configuration))
        self.start(
            "kube-scheduler", str(self.bin / "kube-scheduler"), f"--config={self.folder}/scheduler.json",
            "--secure-port=0",
        )  # fmt: skip

    def start_hami(self, program: Path) -> None:
        """HAMi's scheduler, its webhook registered with the API server, and kube-scheduler with it as an extender.

        As its chart does it, with everything on loopback.
        """
        at = self.folder
        resources = {"resourceCountName": "amd.com/gpu", "resourceCoreName": "amd.com/gpucores"}
        (at / "hami.json").write_text(json.dumps({"amd": resources | {"resourceMemoryName": "amd.com/gpumem"}}))
        self.start(
            "hami-scheduler", str(program), f"--http_bind=127.0.0.1:{self.ports['hami']}",
            f"--cert_file={at}/server.crt", f"--key_file={at}/server.key", "--scheduler-name=hami-scheduler",
            f"--metrics-bind-address=127.0.0.1:{self.ports['hami-metrics']}", f"--device-config-file={at}/hami.json",
            "-v=4", KUBECONFIG=f"{at}/hami-scheduler.kubeconfig",
        )  # fmt: skip
        url = f"https://127.0.0.1:{self.ports['hami']}"
        self.ready("hami-scheduler", lambda: self.port_open("hami"))
        self.api.call("POST", "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations", {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": "hami-webhook"},
            "webhooks": [{
                "name": "vgpu.hami.io",
                "admissionReviewVersions": ["v1beta1", "v1"],
                "clientConfig": {"url": f"{url}/webhook", "caBundle": b64encode(self.api.ca.read_bytes()).decode()},
                "failurePolicy": "Fail",
                "sideEffects": "None",
                "objectSelector": {"matchExpressions": [
                    {"key": "hami.io/webhook", "operator": "NotIn", "values": ["ignore"]}
                ]},
                "rules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                ],
            }],
        })  # fmt: skip
        self.programs.pop("kube-scheduler").end()
        managed = ("amd.com/gpu", "amd.com/gpumem", "amd.com/gpucores")
        self.start_scheduler({
            "urlPrefix": url,
            "enableHTTPS": True,
            "tlsConfig": {"insecure": True},
            "filterVerb": "filter",
            "bindVerb": "bind",
            "nodeCacheCapable": True,
            "weight": 1,
            "httpTimeout": "30s",
            "managedResources": [{"name": name, "ignoredByScheduler": True} for name in managed],
        })  # fmt: skip

    def port_open(self, name: str) -> bool:
        with socket.socket() as line:
            return line.connect_ex(("127.0.0.1", self.ports[name])) == 0

    def start_containerd(self, images: Mapping[str, Path], *, cdi: bool = True) -> None:
        network = self.folder / "cni"
        network.mkdir(exist_ok=True)
        # Never called: all pods have the host's network. Without it the node would not be ready.
        plugins = [{"type": "loopback"}]
        (network / "none.conflist").write_text(json.dumps({"cniVersion": "1.0.0", "name": "none", "plugins": plugins}))
        (self.folder / "containerd.toml").write_text(
            f"""
            version = 2
            root = "/run/containerd/root"
            state = "/run/containerd/state"
            [grpc]
              address = "{CONTAINERD}"
            [plugins."io.containerd.grpc.v1.cri"]
              enable_cdi = {str(cdi).lower()}
              restrict_oom_score_adj = true
              sandbox_image = "{IMAGE}"
              [plugins."io.containerd.grpc.v1.cri".cni]
                conf_dir = "{network}"
                bin_dir = "{network}"
            """
        )
        self.start("containerd", str(self.bin / "containerd"), f"--config={self.folder}/containerd.toml")
        self.ready("containerd", lambda: self.ctr("version").code == 0)
        for name, root in images.items():
            self.add_image(name, root)

    def add_image(self, name: str, root: Path, command: Sequence[str] = ("/bin/sleep", "infinity")) -> None:
        """``root`` (a tar of a root file system) as an image for pods; ``command`` is what it runs by itself."""
        archive = self.folder / "image.tar"
        docker_archive(root, name, archive, command)
        done = self.ctr("images", "import", str(archive))
        assert done.code == 0, done.output
        archive.unlink()

    def ctr(self, *argv: str) -> Finished:
        return self.corner.run(str(self.bin / "ctr"), f"--address={CONTAINERD}", "--namespace=k8s.io", *argv)

    def start_kubelet(self) -> None:
        """Returns when the node is ready to run pods."""
        configuration = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "address": "127.0.0.1",
            "port": self.ports["kubelet"],
            "healthzPort": 0,
            "containerRuntimeEndpoint": f"unix://{CONTAINERD}",
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "evictionHard": {"memory.available": "1Mi"},
            "maxPods": 250,
            "nodeStatusUpdateFrequency": "500ms",
            "volumePluginDir": "/var/lib/kubelet/plugins-of-nobody",
            "shutdownGracePeriod": "0s",
        }
        (self.folder / "kubelet.json").write_text(json.dumps(configuration))
        if "kubelet" in self.programs:
            self.programs["kubelet"].start()
        else:
            self.start(
                "kubelet", str(self.bin / "kubelet"), f"--config={self.folder}/kubelet.json",
                f"--kubeconfig={self.folder}/kubelet.kubeconfig", f"--hostname-override={NODE}", "--v=2",
            )  # fmt: skip
        self.ready("kubelet", self.node_ready)

    def node_ready(self) -> bool:
        conditions = self.api.node(NODE)["status"]["conditions"]
        return any((c["type"], c["status"]) == ("Ready", "True") for c in conditions)

    def allocatable(self, resource: str) -> int | None:
        """None: the kubelet knows no such resource."""
        count = self.api.node(NODE)["status"]["allocatable"].get(resource)
        return None if count is None else int(count)

    def log_of(self, pod: str, container: str = "main", namespace: str = "default", start: int = 0) -> str:
        """What the container has written so far, as the kubelet's log file of its ``start``-th start has it."""
        uid = self.api.pod(pod, namespace)["metadata"]["uid"]
        path = self.corner.path(f"/var/log/pods/{namespace}_{pod}_{uid}/{container}/{start}.log")
        if not path.exists():
            return ""
        return "".join(f"{line.split(' ', 3)[3]}\n" for line in path.read_text().splitlines())

    def end(self) -> None:
        self.kill(*self.programs)

    def kill(self, *programs: str) -> None:
        """These, the last one first, and all containers."""
        containers = self.ctr("containers", "list", "--quiet").output.split() if "containerd" in self.programs else []
        for name in reversed(programs):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.programs[name].end(signal.SIGKILL)
        self.corner.run("sh", "-c", _END_CONTAINERS, "sh", *containers)


def certificates(folder: Path) -> None:
    """A CA, a server's certificate for 127.0.0.1, and the key pair that service accounts' tokens are signed with."""
    (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for line in (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.crt",
        "req -newkey rsa:2048 -nodes -subj /CN=server -keyout server.key -out server.csr",
        "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile extensions -out server.crt",
        "genrsa -out accounts.key 2048",
        "rsa -in accounts.key -pubout -out accounts.pub",
    ):
        subprocess.run(["openssl", *line.split()], cwd=folder, check=True, capture_output=True)


def docker_archive(root: Path, name: str, archive: Path, command: Sequence[str]) -> None:
    """``root`` (a tar of a root file system) as an image that ``ctr images import`` takes: the form of docker save."""
    layer = root.read_bytes()
    settings: dict[str, Any] = {
        "architecture": "amd64",
        "os": "linux",
        # In the image of all tests the sandbox container runs it: a pause that needs no image of its own.
        "config": {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": list(command)},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256(layer).hexdigest()}"]},
    }
    described = json.dumps(settings).encode()
    file_name = f"{sha256(described).hexdigest()}.json"
    manifest = json.dumps([{"Config": file_name, "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(archive, "w") as out:
        for member, content in ((file_name, described), ("layer.tar", layer), ("manifest.json", manifest)):
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            out.addfile(entry, io.BytesIO(content))


def pod(name: str, *argv: str, limits: Mapping[str, str | int] | None = None, **spec: Any) -> dict[str, Any]:
    """A pod of one container ``main`` that runs ``argv`` once and asks for ``limits``."""
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": list(argv),
        "resources": {"limits": {key: str(value) for key, value in (limits or {}).items()}},
    }
    usual = {
        "restartPolicy": "Never",
        "hostNetwork": True,
        # Not 0: such a pod would be gone from the API while it still runs.
        "terminationGracePeriodSeconds": 1,
        "enableServiceLinks": False,
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": usual | spec}


@contextlib.contextmanager
def daemon(cluster: Cluster, *options: str) -> Iterator[Service]:
    """amdvgpud as a service of the machine would run: all pids in sight, the corner's files. It has promised nothing.

    What the daemon of one module has cut would be missing from what the next one offers, and GPUs that it had
    registered would be there still, without health. Ended and started again, it finds what it had promised.
    """
    cluster.corner.run("rm", "-rf", "/var/lib/amdvgpud")
    registered = dict.fromkeys((hami.REGISTRATION, hami.REGISTERED_AT))
    cluster.api.patch(f"/api/v1/nodes/{NODE}", {"metadata": {"annotations": registered}})
    log = cluster.folder / f"amdvgpud-{time.monotonic_ns()}.log"
    argv = cluster.corner.command_outside(str(BIN / "amdvgpud"), "--rest-tcp", "", *options)
    service = Service("amdvgpud", argv, cluster.corner.environment(), log)
    service.start()
    try:
        yield service
    finally:
        service.end()
