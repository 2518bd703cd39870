"""What an operator can set, each thing declared once: the fields of ``Settings``.

One field gives the TOML key, the environment variable, the command-line flag, the default, the check and the help; the
documentation is made from the same table. Nobody else reads the environment. Order, the later winning: defaults,
``/etc/amdvgpud/amdvgpud.toml``, ``conf.d/*.toml`` beside it by name, environment, command line.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from amdvgpud.core.errors import Invalid
from amdvgpud.core.modes import parse_targets
from amdvgpud.core.prefer import POLICIES
from amdvgpud.core.profiles import SliceProfile, parse_profiles
from amdvgpud.core.sizes import parse_size

DEFAULT_FILE: Final = Path("/etc/amdvgpud/amdvgpud.toml")

Parse = Callable[[object, str], Any]
"""(value as TOML, environment or command line gave it, the key's name) -> checked value; ``Invalid`` names the key."""


def _path(value: object, key: str) -> Path:
    if not isinstance(value, str) or not value.startswith("/"):
        raise Invalid.field(key, f"{value!r} is no absolute path")
    return Path(value)


def _optional_path(value: object, key: str) -> Path | None:
    return None if value == "" else _path(value, key)


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise Invalid.field(key, f"{value!r} is no text")
    return value


def _flag(value: object, key: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        return value.lower() in ("true", "yes", "on", "1")
    raise Invalid.field(key, f"{value!r} is neither true nor false")


def _seconds(value: object, key: str) -> float:
    try:
        seconds = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else -1.0
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise Invalid.field(key, f"{value!r} is no number of seconds above 0")
    return seconds


def _seconds_or_none(value: object, key: str) -> float:
    if not isinstance(value, bool) and value in (0, "0"):
        return 0.0
    return _seconds(value, key)


def _count(value: object, key: str) -> int:
    try:
        count = int(value) if isinstance(value, str | int) and not isinstance(value, bool) else 0
    except ValueError:
        count = 0
    if count < 1:
        raise Invalid.field(key, f"{value!r} is no whole number of at least 1")
    return count


def _size(value: object, key: str) -> int:
    return parse_size(value, key) if isinstance(value, int | str) else parse_size(str(value), key)


def _mode(value: object, key: str) -> int:
    try:
        mode = int(value, 8) if isinstance(value, str) else -1
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise Invalid.field(key, f"{value!r} is no file mode: write it as a text of octal digits, as in '0660'")
    return mode


def _listen(value: object, key: str) -> tuple[str, int] | None:
    if value == "":
        return None
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise Invalid.field(key, f"{value!r} is no address: write host:port, as in '127.0.0.1:9841', or '' for none")
    return host.strip("[]"), int(port)


def _choices(allowed: tuple[str, ...]) -> Parse:
    def parse(value: object, key: str) -> tuple[str, ...]:
        words = value.split(",") if isinstance(value, str) else value
        if not isinstance(words, list) or any(w not in allowed for w in words if w != ""):
            raise Invalid.field(key, f"{value!r} is no list of {', '.join(allowed)}")
        return tuple(w for w in words if w)

    return parse


def _word(*allowed: str) -> Parse:
    def parse(value: object, key: str) -> str:
        if value not in allowed:
            raise Invalid.field(key, f"{value!r} is not one of {', '.join(allowed)}")
        return str(value)

    return parse


def _whole_number(value: object, key: str) -> int:
    return 0 if value in (0, "0") and value is not False else _count(value, key)


def _kubelet_modes(value: object, key: str) -> tuple[str, ...]:
    modes = () if value in ("off", ["off"]) else _choices(("hami", "profiles", "whole"))(value, key)
    if {"hami", "whole"} <= set(modes):
        raise Invalid.field(key, "'hami' and 'whole' both offer the GPUs as amd.com/gpu: choose one of the two")
    return modes


def _profiles(value: object, key: str) -> tuple[SliceProfile, ...]:
    try:
        return parse_profiles(value)
    except Invalid as error:
        raise Invalid.field(key, error.detail) from error


def _targets(value: object, key: str) -> tuple[str, ...]:
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise Invalid.field(key, f"{value!r} is no list of GPU=MODE texts, as in ['all=CPX']")
    texts = [text.strip() for text in texts if text.strip()]
    try:
        parse_targets(texts)
    except Invalid as error:
        raise Invalid.field(key, error.detail) from error
    return tuple(texts)


def _listening(value: object, key: str) -> Literal["auto", "on", "off"]:
    if value in (True, "true", "yes", "on", "1"):
        return "on"
    if value in (False, "false", "no", "off", "0"):
        return "off"
    if value == "auto":
        return "auto"
    raise Invalid.field(key, f"{value!r} is none of auto, on and off")


def _image_policy(value: object, key: str) -> str:
    if value not in ("show", "dmem", "refuse"):
        raise Invalid.field(key, f"{value!r} is no policy: show, dmem or refuse")
    return str(value)


def _log_level(value: object, key: str) -> str:
    if value not in ("debug", "info", "warning", "error"):
        raise Invalid.field(key, f"{value!r} is no log level: debug, info, warning or error")
    return str(value)


def _setting(key: str, default: object, parse: Parse, meaning: str) -> Any:
    """A field of Settings; ``default`` is written as a user would write it and goes through ``parse`` like theirs."""
    return field(metadata={"setting": Setting(key, default, parse, meaning)})


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    default: object
    parse: Parse
    meaning: str

    @property
    def variable(self) -> str:
        return "AMDVGPUD_" + self.key.upper().replace(".", "_")

    @property
    def flag(self) -> str:
        return "--" + self.key.replace(".", "-").replace("_", "-")

    @property
    def form(self) -> str:
        """What a value looks like, in one word; :data:`FORMS` explains it."""
        return _FORM_OF.get(self.parse, "LIST" if isinstance(self.default, list) else "TEXT")


FORMS: Final[Mapping[str, str]] = {
    "PATH": "an absolute path",
    "TEXT": "any text",
    "BOOL": "true or false",
    "SECONDS": "a number above 0; fractions are fine",
    "PERIOD": "a number of seconds above 0; 0: never",
    "SWITCH": "auto, on or off",
    "COUNT": "a whole number of at least 1",
    "SIZE": "bytes, or a text such as '256MiB' (K M G T, KiB MiB GiB TiB)",
    "NUMBER": "a whole number of at least 0",
    "PROFILES": "in TOML a table, as in `[kubelet.profiles]` with lines such as "
    '`25c-48g = {compute = "25%", vram = "48GiB", count = 4}`; in the environment and on the command line '
    "`25c-48g=25%:48GiB:4`, with commas between several; without a count, or with 0, as many as fit",
    "MODE": "a file mode as a text of octal digits, as in '0660'",
    "ADDRESS": "host:port, as in '127.0.0.1:9841' or '[::1]:9841'; empty: none",
    "LEVEL": "debug, info, warning or error",
    "POLICY": "show, dmem or refuse",
    "LIST": "in TOML a list of texts; in the environment and on the command line texts with commas between them",
}
_FORM_OF: Final[Mapping[Parse, str]] = {
    _path: "PATH",
    _optional_path: "PATH",
    _text: "TEXT",
    _flag: "BOOL",
    _seconds: "SECONDS",
    _seconds_or_none: "PERIOD",
    _listening: "SWITCH",
    _count: "COUNT",
    _size: "SIZE",
    _mode: "MODE",
    _listen: "ADDRESS",
    _log_level: "LEVEL",
    _whole_number: "NUMBER",
    _profiles: "PROFILES",
    _image_policy: "POLICY",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings, checked. ``origin`` says where each came from."""

    run_dir: Path = _setting(
        "run_dir", "/run/amdvgpud", _path, "Directory of the socket and of the slices' files; kept over restarts."
    )
    state_dir: Path = _setting("state_dir", "/var/lib/amdvgpud", _path, "Directory of the state file.")
    library: Path | None = _setting(
        "library",
        "",
        _optional_path,
        "The gate that containers get. Empty: /usr/lib/amdvgpu/libamdvgpu.so if it is there, else the one that came "
        "with this program.",
    )
    sysfs_root: Path = _setting(
        "sysfs_root", "/", _path, "Directory that holds sys/ and dev/ of the machine to look at: '/' but for tests."
    )
    simulate: str = _setting(
        "simulate", "", _text, "Serve simulated GPUs instead of the machine's, as in '2*mi300x,rx9070xt'."
    )
    amdsmi: bool = _setting(
        "amdsmi", False, _flag, "Ask AMD SMI, if installed, for market names and a cross-check. Ids never depend on it."
    )
    tick_s: float = _setting("tick_s", 2, _seconds, "Seconds between two looks at ledgers and leases.")
    rescan_s: float = _setting("rescan_s", 30, _seconds, "Seconds between two scans of the machine.")
    max_slices_per_partition: int = _setting(
        "max_slices_per_partition", 64, _count, "Most slices on one partition; bounds the size of the metrics too."
    )
    slices_tmpfs_bytes: int = _setting(
        "slices_tmpfs_bytes", "256MiB", _size, "Size limit of the tmpfs that holds the slices' files."
    )
    log_level: str = _setting("log_level", "info", _log_level, "debug, info, warning or error.")
    cdi_dir: Path = _setting("cdi.dir", "/run/cdi", _path, "Directory of the CDI file.")
    cdi_kind: str = _setting("cdi.kind", "amdvgpu.io/slice", _text, "Kind of the CDI devices.")
    cdi_card_nodes: bool = _setting(
        "cdi.card_nodes", False, _flag, "Give slices the card node too, not only the render node."
    )
    cdi_version_limit: str = _setting(
        "cdi.version_limit", "", _text, "Highest CDI version the file may declare; refused at start if too low."
    )
    kernel_sample_s: float = _setting(
        "kernel.sample_s",
        10,
        _seconds,
        "Seconds between two looks at what the kernel accounts to each process; more where a look would cost above a "
        "hundredth of a core.",
    )
    kernel_sdma: bool = _setting(
        "kernel.sdma",
        False,
        _flag,
        "Read each process's activity on the copy engines too, which GET /v1/slices/{name}/processes shows. Slow: the "
        "kernel reads the memory of each process for it.",
    )
    watchdog_policy: str = _setting(
        "watchdog.policy",
        "observe",
        _word("observe", "warn", "kill"),
        "What is done about a process that goes around its slice's gate: observe tells it in events and metrics, warn "
        "in the log and in warnings too, kill ends it.",
    )
    watchdog_allowance: int = _setting(
        "watchdog.allowance",
        "64MiB",
        _size,
        "VRAM that a process may have beyond what its ledger slot says and what its queues need for saving waves.",
    )
    watchdog_after_s: float = _setting(
        "watchdog.after_s", 60, _seconds, "Seconds for which that has to last before anything is said or done."
    )
    watchdog_grace_s: float = _setting(
        "watchdog.grace_s", 10, _seconds, "Seconds from the telling to SIGTERM, and from that to SIGKILL."
    )
    partition_target: tuple[str, ...] = _setting(
        "partition.target",
        [],
        _targets,
        "Modes that idle GPUs are put into when the daemon starts, as in ['all=CPX', '0000:83:00.0=QPX']; later ones "
        "win. A GPU with slices, leases or KFD processes stays as it is.",
    )
    health_pulse_s: float = _setting(
        "health.pulse_s", 10, _seconds_or_none, "Seconds between two looks at how the GPUs are; 0: none is taken."
    )
    health_good_looks: int = _setting(
        "health.good_looks", 3, _count, "Good looks in a row after which a GPU that was not well counts as well again."
    )
    health_unknown_grace_s: float = _setting(
        "health.unknown_grace_s",
        60,
        _seconds,
        "Seconds that a GPU may answer as in a reset before it counts as unhealthy.",
    )
    health_record_age_s: float = _setting(
        "health.record_age_s", 86400, _seconds, "Seconds for which an error that was counted counts."
    )
    health_correctable_per_hour: int = _setting(
        "health.correctable_per_hour",
        100,
        _count,
        "Correctable errors within an hour, of memory or of PCIe, above which a GPU counts as degraded.",
    )
    health_smi_events: Literal["auto", "on", "off"] = _setting(
        "health.smi_events",
        "auto",
        _listening,
        "Listen to the KFD's events, in a child process that keeps /dev/kfd open; while it does, no other tool can "
        "cut a GPU into partitions. auto: where no GPU can be cut.",
    )
    health_exporter_socket: Path | None = _setting(
        "health.exporter_socket",
        "/var/lib/amd-metrics-exporter/amdgpu_device_metrics_exporter_grpc.socket",
        _optional_path,
        "Socket of AMD's metrics exporter; GPUs that it calls unhealthy are. It may be absent; empty: it is not asked.",
    )
    rest_socket_group: str = _setting(
        "rest.socket_group", "amdvgpu", _text, "Group that may change things over the socket; root always may."
    )
    rest_socket_mode: int = _setting("rest.socket_mode", "0660", _mode, "File mode of the API socket.")
    rest_tcp: tuple[str, int] | None = _setting(
        "rest.tcp", "127.0.0.1:9841", _listen, "Loopback address for reads, /metrics and health over TCP; empty: none."
    )
    rest_tcp_details: bool = _setting(
        "rest.tcp_details", False, _flag, "Show process lists and workload names over TCP too."
    )
    rest_token_file: Path = _setting(
        "rest.token_file",
        "/etc/amdvgpud/token",
        _path,
        "File with the token that allows changes over TCP, if it exists.",
    )
    hook_enabled: bool = _setting(
        "hook.enabled",
        True,
        _flag,
        "Name amdvgpu-hook in the CDI file: runtimes then tell the daemon which container has got a slice.",
    )
    hook_required: bool = _setting(
        "hook.required",
        False,
        _flag,
        "Let no container with a slice start that the daemon was not told of, also while the daemon is away.",
    )
    images_policy: str = _setting(
        "images.policy",
        "show",
        _image_policy,
        "What becomes of a container that the gate cannot get into: 'show' it, let it start only under the kernel's "
        "cap ('dmem'), or 'refuse' it.",
    )
    dmem_enabled: bool = _setting(
        "dmem.enabled", True, _flag, "Let the kernel cap the VRAM of containers, where it has the dmem controller."
    )
    dmem_delegate: bool = _setting(
        "dmem.delegate", True, _flag, "Switch the dmem controller on in the cgroups above a container's."
    )
    dmem_allowance_bytes: int = _setting(
        "dmem.allowance",
        "64MiB",
        _size,
        "What the kernel's cap has above a container's quotas on each GPU: page tables and the like, which the gate "
        "does not count.",
    )
    metrics_compat: tuple[str, ...] = _setting(
        "metrics.compat", [], _choices(("hami",)), "Also export metrics under these products' names."
    )
    kubelet_mode: tuple[str, ...] = _setting(
        "kubelet.mode",
        [],
        _kubelet_modes,
        "What to offer to this cluster node's kubelet: 'profiles' (slices of fixed sizes), 'whole' (GPUs and "
        "partitions, for one pod each), 'hami' (what HAMi's scheduler deals in). Empty or 'off': nothing.",
    )
    kubelet_dir: Path = _setting(
        "kubelet.dir", "/var/lib/kubelet/device-plugins", _path, "The kubelet's directory of device plugins."
    )
    kubelet_pod_resources: Path = _setting(
        "kubelet.pod_resources",
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        _path,
        "The kubelet's socket of pod resources, which says whose devices are in use.",
    )
    kubelet_profiles: tuple[SliceProfile, ...] = _setting(
        "kubelet.profiles",
        {},
        _profiles,
        "Slices that are cut beforehand in mode 'profiles', each offered as amdvgpu.io/<name>; in this order.",
    )
    kubelet_naming: str = _setting(
        "kubelet.naming",
        "single",
        _word("single", "mixed"),
        "Resource names in mode 'whole': 'single' (amd.com/gpu for all, which must be partitioned alike) or 'mixed' "
        "(amd.com/<compute>_<memory mode>, as in amd.com/cpx_nps4).",
    )
    kubelet_split_count: int = _setting(
        "kubelet.split_count",
        0,
        _whole_number,
        "Containers that may share a GPU in mode 'hami'; 0: 2 on gfx12, else 10.",
    )
    kubelet_preference: str = _setting(
        "kubelet.preference",
        "besteffort",
        _word(*POLICIES),
        "Which GPUs a pod with several gets: near each other ('besteffort', also called 'binpack') or far apart "
        "('spread').",
    )
    kubelet_delivery: str = _setting(
        "kubelet.delivery",
        "auto",
        _word("auto", "nodes", "cdi"),
        "How a container gets its slice: 'nodes' (device nodes, mounts and variables, which every kubelet and runtime "
        "knows) or 'cdi' (CDI names, and with them amdvgpu-hook: kubelet 1.29 or later and a runtime with CDI switched "
        "on). 'auto': by names where the Kubernetes API and the runtime's configuration say that both take them.",
    )
    kubelet_runtime_config: Path | None = _setting(
        "kubelet.runtime_config",
        "",
        _optional_path,
        "Configuration file of the cluster node's container runtime, for delivery 'auto'. Empty: where containerd, "
        "that of k3s or rke2, or CRI-O has it.",
    )
    kubelet_take_over: bool = _setting(
        "kubelet.take_over",
        False,
        _flag,
        "Register a resource name that another device plugin has: the kubelet gives it to the last one.",
    )
    kube_config: Path | None = _setting(
        "kube.config", "", _optional_path, "Kubeconfig for the Kubernetes API; empty: the pod's service account."
    )
    kube_node_name: str = _setting(
        "kube.node_name", "", _text, "This cluster node's name; empty: NODE_NAME if it is set, else the host's name."
    )
    kube_labels: bool = _setting(
        "kube.labels",
        False,
        _flag,
        "Label this cluster node by what GPUs it has, as AMD's node labeller does: amd.com/gpu.vram=192G and so on.",
    )
    hami_mode: str = _setting(
        "hami.mode",
        "",
        _word("", "cu", "partition"),
        "What HAMi's scheduler is offered: 'cu' (GPUs, shared) or 'partition' (partitions, one container each). Empty: "
        "OPERATING_MODE if it is set, else cu. The Node's annotation hami.io/amd-operating-mode beats it.",
    )
    hami_amounts: bool = _setting(
        "hami.amounts",
        False,
        _flag,
        "Say in this Node's status how much amd.com/gpumem (MiB) and amd.com/gpucores (per cent) it has, in mode "
        "'hami'. For other readers than HAMi's scheduler; needs the right to patch nodes/status.",
    )
    hami_compute_partition: str = _setting(
        "hami.compute_partition",
        "",
        _text,
        "Compute mode that idle GPUs are put into at start in HAMi's mode 'partition'. Empty: COMPUTE_PARTITION if it "
        "is set, else as they are. The Node's annotation hami.io/amd-compute-partition beats it.",
    )
    origin: Mapping[str, str]


SETTINGS: Final[Mapping[str, Setting]] = {
    f.metadata["setting"].key: f.metadata["setting"] for f in fields(Settings) if "setting" in f.metadata
}
_FIELD_OF: Final = {f.metadata["setting"].key: f.name for f in fields(Settings) if "setting" in f.metadata}


def read_settings(environment: Mapping[str, str], flags: Mapping[str, str], file: Path | None = None) -> Settings:
    """Settings from all sources. ``flags`` maps keys to texts. ``file`` None: the default one, which may be absent.

    ``Invalid`` names each bad key, one a line, its origin and the way out; an unknown key is an error with the nearest
    known one. All at once, so that nobody mends a file one error a try.
    """
    given: dict[str, tuple[object, str]] = {s.key: (s.default, "default") for s in SETTINGS.values()}
    wrong: list[Invalid] = []
    for path in _files(file):
        for key, value in _read_file(path):
            if key in SETTINGS:
                given[key] = (value, str(path))
            else:
                wrong.append(Invalid(_unknown(key, list(SETTINGS), str(path))))
    variables = {s.variable: s.key for s in SETTINGS.values()}
    for name, text in environment.items():
        if name in variables:
            given[variables[name]] = (text, f"environment {name}")
        elif name.startswith("AMDVGPUD_"):
            wrong.append(Invalid(_unknown(name, list(variables), "the environment")))
    given |= {key: (text, f"command line {SETTINGS[key].flag}") for key, text in flags.items()}

    values: dict[str, object] = {}
    for key, (value, origin) in given.items():
        try:
            values[_FIELD_OF[key]] = SETTINGS[key].parse(value, key)
        except Invalid as error:
            wrong.append(Invalid(f"{error.detail} (from {origin})", error.fields))
    if wrong:
        raise Invalid("\n".join(w.detail for w in wrong), tuple(f for w in wrong for f in w.fields))
    settings = Settings(**values, origin={key: origin for key, (_, origin) in given.items()})  # type: ignore[arg-type]
    _check_hook_reaches(settings)
    return settings


def _check_hook_reaches(settings: Settings) -> None:
    """What only the hook can do must not be asked for where the hook does not come along.

    What kubelet.delivery 'auto' comes to is known when the daemon starts, and is judged there.
    """
    wanted = _resting_on_hook(settings)
    if wanted and not settings.hook_enabled:
        raise Invalid.field("hook.enabled", f"is off, and {wanted} needs the hook: switch it on")
    if settings.kubelet_delivery == "nodes" and (wanted := hook_needs(settings)):
        raise Invalid.field(
            "kubelet.delivery", f"'nodes' brings no hook into pods, which {wanted} needs: set it to 'cdi'"
        )


def hook_needs(settings: Settings) -> str:
    """The settings that are worth nothing for pods without the hook, as words of a sentence; '': none."""
    return _resting_on_hook(settings) if {"profiles", "hami"} & set(settings.kubelet_mode) else ""


def _resting_on_hook(settings: Settings) -> str:
    wanted = ["hook.required"] if settings.hook_required else []
    wanted += [f"images.policy = {settings.images_policy!r}"] if settings.images_policy != "show" else []
    return " and ".join(wanted)


def shown(settings: Settings) -> dict[str, object]:
    """Each key with its value, as texts and numbers fit for JSON. No secret is among them: only files that hold one."""
    plain: dict[str, object] = {}
    for key, name in _FIELD_OF.items():
        value = getattr(settings, name)
        if key == "rest.tcp" and value is not None:
            value = f"{value[0]}:{value[1]}"
        elif key == "rest.socket_mode":
            value = f"{value:04o}"
        elif isinstance(value, Path):
            value = str(value)
        elif isinstance(value, tuple):
            value = [entry if isinstance(entry, str) else str(entry) for entry in value]
        plain[key] = "" if value is None else value
    return plain


def _files(file: Path | None) -> Iterator[Path]:
    main = DEFAULT_FILE if file is None else file
    if file is not None or main.exists():
        yield main
    yield from sorted((main.parent / "conf.d").glob("*.toml"))


def _read_file(path: Path) -> Iterator[tuple[str, object]]:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Invalid(f"{path} cannot be read: {error}") from error
    yield from _flat(document)


def _flat(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in SETTINGS:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _unknown(name: str, known: list[str], origin: str) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"
    return f"{name} is no setting of amdvgpud (from {origin}): {hint}"
