"""amdvgpuctl: the command line of the daemon's API.

Owns the words on the command line, the exit codes, and how an error reads. Everything it knows it asks of the daemon
(:mod:`amdvgpud.ctl.client`); only ``run --standalone`` works without one. Imports that a command needs are made in it:
``--help`` and completion are waited for at every keystroke.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import click

if TYPE_CHECKING:
    from amdvgpud.core import wire
    from amdvgpud.ctl.client import Client
    from amdvgpud.ctl.delivery import Grant, Program
    from amdvgpud.ctl.doctor import Finding

OK: Final = 0
REFUSED: Final = 1
USAGE: Final = 2
NOT_REACHABLE: Final = 3
NOT_PERMITTED: Final = 4

EXIT_CODES: Final = (
    (str(OK), "Done."),
    (str(REFUSED), "The daemon refused, or the check failed; the reason is on standard error."),
    (str(USAGE), "The command line is wrong."),
    (str(NOT_REACHABLE), "The daemon is not reachable."),
    (str(NOT_PERMITTED), "This user is not permitted to do that."),
    ("126, 127", "run: the command cannot be executed, or is not found."),
    ("128+n", "run: the command was ended by signal n."),
    ("any", "run: otherwise the command's own exit code."),
)

_F = TypeVar("_F", bound=Callable[..., Any])

_EPILOG: Final = "\b\nExit codes:\n" + "\n".join(f"  {code:<9} {meaning}" for code, meaning in EXIT_CODES)


class _Failed(click.ClickException):
    """An error that is already in a person's words: one line, then at most one for each bad field."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc] # click's own subclasses set it per instance, too

    def show(self, file: Any = None) -> None:
        click.echo(f"amdvgpuctl: {self.message}", file=file or sys.stderr)


@contextmanager
def _said_plainly() -> Iterator[None]:
    """What the daemon, the machine or core refuse within, as an exit code and a sentence."""
    from amdvgpud.core.errors import AmdvgpuError
    from amdvgpud.ctl.client import NotPermitted, NotReachable, Refused

    try:
        yield
    except Refused as e:
        fields = [
            f"  {field.get('pointer', '')}: {field.get('detail', '')}"
            for field in e.problem.errors
            if field.get("detail", "") not in str(e)
        ]
        raise _Failed("\n".join([str(e), *fields]), REFUSED) from e
    except NotPermitted as e:
        raise _Failed(str(e), NOT_PERMITTED) from e
    except NotReachable as e:
        raise _Failed(str(e), NOT_REACHABLE) from e
    except AmdvgpuError as e:
        raise _Failed(str(e), REFUSED) from e


def _client() -> Client:
    from amdvgpud.ctl.client import Client

    return Client(click.get_current_context().find_root().params["socket"])


def _reading(command: _F) -> _F:
    """``-o json`` on a command that reads: what the API said, byte for byte."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        help="A table for people, or the JSON of the API for programs.",
    )(command)


def _print_json(raw: bytes) -> None:
    click.echo(raw.rstrip(b"\n"))


# ------------------------------------------------------------------------------------------------------ completion


def _complete_slices(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in _names_for_completion(_ctx, "slices") if name.startswith(incomplete)]


def _complete_gpus(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in _names_for_completion(_ctx, "gpus") if name.lower().startswith(incomplete.lower())]


def _complete_modes(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return [mode for mode in ("spx", "dpx", "tpx", "qpx", "cpx") if mode.startswith(incomplete.lower())]


def _names_for_completion(ctx: click.Context, what: str) -> list[str]:
    """Names the daemon knows; none when it cannot be asked: a shell's Tab key is no place for an error."""
    from amdvgpud.core import wire
    from amdvgpud.ctl.client import Client, ClientError

    client = Client(ctx.find_root().params["socket"])
    try:
        if what == "slices":
            return [s.name for s in client.get("/v1/slices", wire.SliceList)[0].slices]
        gpus = client.get("/v1/gpus", wire.GpuList)[0].gpus
        return [form for g in gpus for form in (str(g.index), g.id, g.pci_address, *(p.id for p in g.partitions))]
    except ClientError:
        return []


# ------------------------------------------------------------------------------------------------------------ root


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--socket",
    envvar="AMDVGPU_SOCKET",
    show_envvar=True,
    default="/run/amdvgpud/api.sock",
    show_default=True,
    metavar="PATH",
    help="The unix socket of the daemon.",
)
@click.version_option(package_name="amdvgpud", prog_name="amdvgpuctl")
def cli(socket: str) -> None:
    """Share the AMD GPUs of this machine: cut slices, run commands in them, see what they use."""


# ------------------------------------------------------------------------------------------------------------ gpu


@cli.group()
def gpu() -> None:
    """Show the GPUs, and set what may be placed on them."""


@gpu.command("list")
@_reading
def gpu_list(output: str) -> None:
    """List the GPUs, what is free on them, and every name by which each can be asked for."""
    from amdvgpud.core import wire
    from amdvgpud.ctl import show

    with _said_plainly():
        answer, raw = _client().get("/v1/gpus", wire.GpuList)
    _print_json(raw) if output == "json" else show.gpus(answer)


@gpu.command("show")
@click.argument("gpu", shell_complete=_complete_gpus)
@_reading
def gpu_show(gpu: str, output: str) -> None:
    """Show one GPU and its partitions. GPU is any name that `gpu list` shows."""
    from amdvgpud.core import wire
    from amdvgpud.ctl import show
    from amdvgpud.ctl.client import part

    with _said_plainly():
        answer, raw = _client().get(f"/v1/gpus/{part(gpu)}", wire.GpuView)
    _print_json(raw) if output == "json" else show.gpu(answer)


@gpu.command()
@click.argument("gpu", shell_complete=_complete_gpus)
def cordon(gpu: str) -> None:
    """Place nothing new on a GPU. What is on it stays."""
    from amdvgpud.core import wire

    _patch_gpu(gpu, wire.GpuPatch(cordoned=True))


@gpu.command()
@click.argument("gpu", shell_complete=_complete_gpus)
def uncordon(gpu: str) -> None:
    """Let new slices be placed on a GPU again."""
    from amdvgpud.core import wire

    _patch_gpu(gpu, wire.GpuPatch(cordoned=False))


@gpu.command()
@click.argument("gpu", shell_complete=_complete_gpus)
@click.option(
    "--override",
    type=click.Choice(["healthy", "unhealthy", "none"]),
    help="What holds from now on, whatever is found; none takes that back.",
)
@_reading
def health(gpu: str, override: str | None, output: str) -> None:
    """Show how a GPU is, who found it and since when; or have the last word on it.

    A GPU that is unhealthy or unknown takes no new slice and no new lease. What is on it stays.
    """
    from amdvgpud.core import wire
    from amdvgpud.ctl import show
    from amdvgpud.ctl.client import part

    path = f"/v1/gpus/{part(gpu)}"
    with _said_plainly():
        if override is None:
            answer, raw = _client().get(path, wire.GpuView)
        else:
            patch = wire.GpuPatch(health_override=override)  # type: ignore[arg-type]  # click has checked it
            answer, raw = _client().change("PATCH", path, wire.GpuView, patch)
    _print_json(raw) if output == "json" else show.health(answer)


@gpu.command()
@click.argument("gpu", shell_complete=_complete_gpus)
@click.argument("ratio", type=click.FloatRange(1, 16))
def oversubscribe(gpu: str, ratio: float) -> None:
    """Let the quotas on a GPU sum up to RATIO times its VRAM. 1 switches it off."""
    from amdvgpud.core import wire

    _patch_gpu(gpu, wire.GpuPatch(oversubscription=ratio))


@gpu.command()
@click.argument("gpu", shell_complete=_complete_gpus)
@click.argument("mode", shell_complete=_complete_modes)
@click.option("--memory", metavar="NPS", help="Let the driver come up with this memory mode when it is loaded anew.")
@click.option("--dry-run", is_flag=True, help="Say what would be refused or lost, and change nothing.")
@click.option("--force", is_flag=True, help="Though slices that nobody uses are lost until the mode before is back.")
@_reading
def partition(gpu: str, mode: str, memory: str | None, dry_run: bool, force: bool, output: str) -> None:
    """Cut a GPU into MODE: spx (whole), dpx, tpx, qpx or cpx (one partition an XCC). `gpu show` lists what it can.

    Refused while a lease, a process in a slice or any KFD process is on it; these are named. Slices that nobody uses
    would be lost: delete them first, or use --force. Memory modes are not switched by this: the driver notes the wish,
    and takes it up when the driver of the whole node is unloaded and loaded again.
    """
    from amdvgpud.core import wire
    from amdvgpud.ctl.client import part

    query = {name: "true" for name, given in (("dry_run", dry_run), ("force", force)) if given}
    with _said_plainly():
        answer, raw = _client().change(
            "PUT",
            f"/v1/gpus/{part(gpu)}/partition",
            wire.RepartitionView,
            wire.PartitionSpec(compute=mode, memory=memory),
            None,
            **query,
        )
    _print_json(raw) if output == "json" else click.echo(answer.note)


def _patch_gpu(gpu: str, patch: wire.GpuPatch) -> None:
    from amdvgpud.core import wire
    from amdvgpud.ctl.client import part

    with _said_plainly():
        answer, _ = _client().change("PATCH", f"/v1/gpus/{part(gpu)}", wire.GpuView, patch)
    state = "cordoned" if answer.cordoned else "open for new slices"
    ratio = "off" if answer.oversubscription == 1 else f"{answer.oversubscription:g}"
    click.echo(f"{answer.id}: {state}, oversubscription {ratio}")


# ---------------------------------------------------------------------------------------------------------- slice


def _placement(command: _F) -> _F:
    """The options that say what a slice is to be; `slice create`, `plan` and `run` take the same."""
    for option in reversed(
        (
            click.option("--vram", metavar="SIZE", help="VRAM on each GPU, as in 16GiB. Without it: all that is left."),
            click.option("--compute", metavar="AMOUNT", help="Compute on each GPU: 25%, 38 (CUs) or whole."),
            click.option(
                "--policy",
                type=click.Choice(["balanced", "fine", "exact", "whole", "shared"]),
                help="How CUs are chosen. Without it: balanced, which hands out whole rows.",
            ),
            click.option(
                "--gpu",
                "on",
                metavar="GPU",
                multiple=True,
                shell_complete=_complete_gpus,
                help="A GPU or partition to use, by any name that `gpu list` shows. May be given several times.",
            ),
            click.option(
                "--gpus",
                type=click.IntRange(1, 16),
                help="How many different GPUs. Without it: as many as are named by --gpu, else one.",
            ),
            click.option("--spread", "spread", flag_value="spread", help="Prefer the emptiest GPU that fits."),
            click.option("--binpack", "spread", flag_value="binpack", help="Prefer the fullest; this is the default."),
            click.option(
                "--priority",
                type=click.Choice(["low", "normal", "high"]),
                help="The most that its queues may ask for beside other slices. Without it: normal.",
            ),
            click.option(
                "--owner",
                metavar="USER",
                help="User (name or uid) whose rootless runtime may mount the slice's files. Without it: yourself.",
            ),
            click.option(
                "--oversubscribe",
                is_flag=True,
                default=None,
                help="Where the GPU has no VRAM left, let host memory serve, within the quota.",
            ),
        )
    ):
        command = option(command)
    return command


def _spec(on: tuple[str, ...], gpus: int | None, **asked: str | bool | None) -> wire.SliceSpec:
    """What the options of :func:`_placement` say; its names are the API's but for ``--gpu``."""
    import msgspec

    from amdvgpud.core import wire

    given = {**asked, "gpus": gpus or len(on) or 1}
    return msgspec.convert({"on": list(on)} | {k: v for k, v in given.items() if v is not None}, wire.SliceSpec)


@cli.group("slice")
def slice_group() -> None:
    """Create, show, resize and delete slices."""


@slice_group.command("create")
@click.argument("name")
@_placement
@click.option("--dry-run", is_flag=True, help="Say where the slice would go, and change nothing.")
@_reading
def slice_create(name: str, dry_run: bool, output: str, **asked: Any) -> None:
    """Create the slice NAME. A slice of that name that exists already is left alone, and the command refused."""
    if dry_run:
        _plan(name, output, **asked)
        return
    from amdvgpud.core import wire
    from amdvgpud.ctl import show
    from amdvgpud.ctl.client import part

    with _said_plainly():
        answer, raw = _client().change(
            "PUT", f"/v1/slices/{part(name)}", wire.SliceView, _spec(**asked), {"If-None-Match": "*"}
        )
    if output == "json":
        _print_json(raw)
        return
    click.echo(f"{answer.name}: {show.amounts(answer.shares)}")
    if answer.cdi_device:
        click.echo(f"podman run --device {answer.cdi_device} …")


@slice_group.command("list")
@_reading
def slice_list(output: str) -> None:
    """List the slices with their quotas and what they use."""
    import msgspec

    from amdvgpud.core import wire
    from amdvgpud.ctl import show

    with _said_plainly():
        client = _client()
        answer, raw = client.get("/v1/slices", wire.SliceList)
        while answer.next_cursor is not None:
            page, _ = client.get("/v1/slices", wire.SliceList, cursor=answer.next_cursor)
            page.slices = answer.slices + page.slices
            answer, raw = page, msgspec.json.encode(page)
    _print_json(raw) if output == "json" else show.slices(answer)


@slice_group.command("show")
@click.argument("name", shell_complete=_complete_slices)
@_reading
def slice_show(name: str, output: str) -> None:
    """Show one slice: its shares, what it uses, and which processes are in it."""
    from amdvgpud.core import wire
    from amdvgpud.ctl import show
    from amdvgpud.ctl.client import part

    path = f"/v1/slices/{part(name)}"
    with _said_plainly():
        client = _client()
        # The usage first: asking for it makes the daemon read the ledger, and the slice's state follows from that.
        usage, _ = client.get(f"{path}/usage", wire.UsageView)
        processes, _ = client.get(f"{path}/processes", wire.ProcessList)
        answer, raw = client.get(path, wire.SliceView)
    if output == "json":
        _print_json(raw)
        return
    show.slice(answer, usage, processes)


@slice_group.command("resize")
@click.argument("name", shell_complete=_complete_slices)
@click.option("--vram", required=True, metavar="SIZE", help="The new VRAM quota on each GPU, as in 16GiB.")
def slice_resize(name: str, vram: str) -> None:
    """Change the VRAM quota of a slice while it runs. A process keeps the total it was shown until it starts again."""
    from amdvgpud.core import wire
    from amdvgpud.ctl import show
    from amdvgpud.ctl.client import part

    with _said_plainly():
        answer, _ = _client().change("PATCH", f"/v1/slices/{part(name)}", wire.SliceView, wire.SliceResize(vram=vram))
    click.echo(f"{answer.name}: {show.amounts(answer.shares)}")


@slice_group.command("delete")
@click.argument("names", nargs=-1, required=True, metavar="NAME…", shell_complete=_complete_slices)
@click.option("--force", is_flag=True, help="Though processes run in it or a lease holds it.")
def slice_delete(names: tuple[str, ...], force: bool) -> None:
    """Delete slices. The first refusal ends the command."""
    from amdvgpud.ctl.client import part

    with _said_plainly():
        client = _client()
        for name in names:
            client.delete(f"/v1/slices/{part(name)}", **({"force": "true"} if force else {}))
            click.echo(f"{name}: deleted")


@cli.command()
@click.argument("name", default="plan")
@_placement
@click.option("--suggest-mode", is_flag=True, help="Compare partition modes for the slices that --want names.")
@click.option(
    "--want",
    metavar="COUNTxCOMPUTE:VRAM",
    multiple=True,
    help="With --suggest-mode: slices, as in 4x25%:47GiB (of a whole GPU) or 38:24GiB (CUs). May be given again.",
)
@_reading
def plan(name: str, output: str, suggest_mode: bool, want: tuple[str, ...], **asked: Any) -> None:
    """Say where a slice would go and draw which CUs it would get. Nothing changes.

    With --suggest-mode: which partition modes suit a mix of slices, hard isolation against waste.
    """
    if suggest_mode != bool(want):
        raise click.UsageError("--suggest-mode and --want go together.")
    if suggest_mode:
        _suggest(want, output)
    else:
        _plan(name, output, **asked)


def _suggest(want: tuple[str, ...], output: str) -> None:
    from amdvgpud.core import wire
    from amdvgpud.ctl import show

    with _said_plainly():
        answer, raw = _client().get("/v1/suggest-modes", wire.ModeProposals, want=",".join(want))
    _print_json(raw) if output == "json" else show.proposals(answer)


def _plan(name: str, output: str, **asked: Any) -> None:
    from amdvgpud.core import wire
    from amdvgpud.ctl import show
    from amdvgpud.ctl.client import part

    with _said_plainly():
        client = _client()
        answer, raw = client.change(
            "PUT", f"/v1/slices/{part(name)}", wire.PlanView, _spec(**asked), {"If-None-Match": "*"}, dry_run="true"
        )
        if output == "json":
            _print_json(raw)
            return
        gpus, _ = client.get("/v1/gpus", wire.GpuList)
        slices, _ = client.get("/v1/slices", wire.SliceList)
    show.plan(answer, gpus, slices)


# ---------------------------------------------------------------------------------------------------------- lease


def _seconds(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})([smhd]?)", value, re.ASCII)
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(f"{value!r} is no time: write a whole number with s, m, h or d, as in 90s.")
    return float(int(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]])


@cli.group()
def lease() -> None:
    """Grant, show and release leases: who has a right to which slice."""


@lease.command("create")
@_placement
@click.option("--slice", "named", metavar="NAME", shell_complete=_complete_slices, help="Lease this slice that exists.")
@click.option(
    "--bind",
    type=click.Choice(["holder", "container"]),
    default="holder",
    show_default=True,
    help="It ends with its holder's process (--pid), or with the last container that has the slice, once one had it.",
)
@click.option("--pid", type=click.IntRange(1), help="The holder's process: the lease ends with it.")
@click.option("--ttl", callback=_seconds, metavar="TIME", help="End the lease after so long, as in 90s, 10m or 2h.")
@click.option("--holder", default="", metavar="TEXT", help="Who it is for, in words; everybody may read them.")
@_reading
def lease_create(
    named: str | None,
    bind: str,
    pid: int | None,
    ttl: float | None,
    holder: str,
    output: str,
    **asked: Any,
) -> None:
    """Grant a lease on the slice --slice, or on one that is made for it by the other options and goes with it.

    Nobody else gets a lease on the slice while this one lasts. Without --pid, --ttl and --bind container it lasts until
    it is released. One that is bound to a container waits until a container takes the slice; --ttl bounds that.
    """
    from amdvgpud.core import wire
    from amdvgpud.ctl.client import part

    if named is not None and any(v not in (None, ()) for v in asked.values()):
        raise click.UsageError("--slice names a slice that exists; leave out the options that describe a new one.")
    spec = wire.LeaseSpec(
        slice=named,
        request=_spec(**asked) if named is None else None,
        holder=holder,
        pid=pid,
        ttl_s=ttl,
        bind=bind,  # type: ignore[arg-type]  # click has checked it
    )
    with _said_plainly():
        client = _client()
        answer, raw = client.change("POST", "/v1/leases", wire.LeaseView, spec)
        if output == "json":
            _print_json(raw)
            return
        device = client.get(f"/v1/slices/{part(answer.slice)}", wire.SliceView)[0].cdi_device
    click.echo(f"{answer.id}: slice {answer.slice}")
    if device:
        click.echo(f"podman run --device {device} …")


@lease.command("list")
@_reading
def lease_list(output: str) -> None:
    """List the leases."""
    from amdvgpud.core import wire
    from amdvgpud.ctl import show

    with _said_plainly():
        answer, raw = _client().get("/v1/leases", wire.LeaseList)
    _print_json(raw) if output == "json" else show.leases(answer)


@lease.command("release")
@click.argument("lease_id", metavar="ID")
def lease_release(lease_id: str) -> None:
    """End a lease. A slice that was made for it goes with it."""
    from amdvgpud.ctl.client import part

    with _said_plainly():
        _client().delete(f"/v1/leases/{part(lease_id)}")
    click.echo(f"{lease_id}: released")


# ------------------------------------------------------------------------------------------------------------ run


@cli.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False}, epilog=_EPILOG)
@_placement
@click.option("--slice", "named", metavar="NAME", shell_complete=_complete_slices, help="Use this slice that exists.")
@click.option("--ttl", callback=_seconds, metavar="TIME", help="End the command after so long, as in 90s, 10m or 2h.")
@click.option(
    "--deliver",
    type=click.Choice(["auto", "mounts", "environment"]),
    default="auto",
    show_default=True,
    help="How the slice is brought to the command: by private mounts, by environment variables only (which `env -i` "
    "sheds), or the first where it is allowed. With mounts, the command does not start without them.",
)
@click.option("--require-gate", is_flag=True, help="Refuse a command that the gate cannot be loaded into.")
@click.option("--standalone", is_flag=True, help="Work without a daemon. Nothing is reserved: others are not counted.")
@click.option(
    "--sysfs-root",
    type=click.Path(exists=True, file_okay=False),
    default="/",
    help="With --standalone: where sys/ and dev/ are read.",
)
@click.option("-q", "--quiet", is_flag=True, help="Do not say by what the limits are enforced.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    named: str | None,
    ttl: float | None,
    deliver: str,
    require_gate: bool,
    standalone: bool,
    sysfs_root: str,
    quiet: bool,
    command: tuple[str, ...],
    **asked: Any,
) -> NoReturn:
    """Run COMMAND in a slice, which is released when the command ends.

    The command sees only its quota of VRAM and gets only its compute units; so do all processes that it starts. Write
    `--` before a command that has options of its own. Signals are passed on, and the exit code is the command's.

    As root the slice is brought in by private mounts; as a user by a user namespace with such mounts, in which files of
    other users seem to belong to `nobody` and set-uid programs gain nothing. On a host without /etc/ld.so.preload, /etc
    is read-only for the command.
    """
    made_for = {k: v for k, v in asked.items() if v not in (None, ())}
    if named is not None and (made_for or standalone):
        raise click.UsageError("--slice names a slice that exists; leave out the options that describe a new one.")
    from amdvgpud.ctl.delivery import program_of

    try:
        program = program_of(command[0], os.environ.get("PATH"))
    except FileNotFoundError:
        raise _Failed(f"{command[0]}: command not found", 127) from None
    except PermissionError:
        raise _Failed(f"{command[0]}: not executable", 126) from None
    if require_gate and program.out_of_reach:
        raise _Failed(f"{program.out_of_reach}: its limits would not be enforced", REFUSED)
    with _said_plainly():
        if standalone:
            from amdvgpud.ctl.standalone import granted

            with granted(_spec(**asked), sysfs_root) as (grant, what):
                code = _run(grant, program, command, deliver, ttl, "" if quiet else f"standalone: {what}", "gate")
        else:
            code = _run_leased(named, _spec(**asked), program, command, deliver, ttl, quiet)
    sys.exit(code)


def _run_leased(
    named: str | None,
    spec: wire.SliceSpec,
    program: Program,
    command: tuple[str, ...],
    deliver: str,
    ttl_s: float | None,
    quiet: bool,
) -> int:
    from pathlib import Path

    from amdvgpud.core import wire
    from amdvgpud.ctl import show
    from amdvgpud.ctl.cgroup import OwnCgroup
    from amdvgpud.ctl.client import ClientError, part
    from amdvgpud.ctl.delivery import Grant
    from amdvgpud.ctl.libraries import gate_library, hook_program

    client = _client()
    # The program's name, not its arguments: people put secrets there, and everybody may read the leases.
    asked = wire.LeaseSpec(
        slice=named,
        request=spec if named is None else None,
        holder=f"amdvgpuctl run {program.path.name}"[:256],
        pid=os.getpid(),
        ttl_s=None,
    )
    lease, _ = client.change("POST", "/v1/leases", wire.LeaseView, asked)
    try:
        preload = tuple(Path(p) for p in lease.preload) or (gate_library(),)
        slice_dir = Path(lease.slice_dir)
        apart = OwnCgroup.fresh(lease.slice, hook_program(preload[0]), slice_dir.parents[1] / "report.sock")
        grant = Grant(lease.slice, slice_dir / "guest", lease.environment, preload, apart)
        if not os.access(grant.guest / "policy", os.R_OK):
            # Refused here, in words: the gate would refuse all VRAM for want of a policy.
            why = f"slice {lease.slice} belongs to another user: uid {os.geteuid()} cannot read {grant.guest}"
            raise _Failed(f"{why}. Let its owner or root run the command", NOT_PERMITTED)
        view, _ = client.get(f"/v1/slices/{part(lease.slice)}", wire.SliceView)
        what = f"slice {lease.slice}: {show.amounts(view.shares)}"
        return _run(grant, program, command, deliver, ttl_s, "" if quiet else what, view.enforced_by)
    finally:
        try:
            client.delete(f"/v1/leases/{part(lease.id)}")
        except ClientError as e:
            # The command's exit code stands. The daemon ends the lease by itself, as its holder's process is ending.
            if not quiet:
                click.echo(f"amdvgpuctl: lease {lease.id} was not released: {e}", err=True)


def _run(
    grant: Grant,
    program: Program,
    command: tuple[str, ...],
    deliver: str,
    ttl_s: float | None,
    what: str,
    enforced_by: str,
) -> int:
    """``what`` empty: quiet."""
    from amdvgpud.ctl.delivery import CannotDeliver
    from amdvgpud.ctl.run import Deliver
    from amdvgpud.ctl.run import run as run_in

    def announce(mounted: bool, why_not: str | None, no_cgroup: str | None) -> str:
        if not what:
            return ""
        if program.out_of_reach:
            return f"amdvgpuctl: {what}; NOT enforced: {program.out_of_reach}"
        by = enforced_by if mounted else f"{enforced_by} (environment)"
        apart = f"; no cgroup of its own: {no_cgroup}" if no_cgroup else ""
        return f"amdvgpuctl: {what}; enforced by: {by}" + (f" ({why_not})" if why_not else "") + apart

    try:
        return run_in(grant, program, command, Deliver(deliver), announce, ttl_s)
    except CannotDeliver as e:
        raise _Failed(f"the slice cannot be delivered by mounts: {e}", REFUSED) from e


# ------------------------------------------------------------------------------------------------------------ cdi


@cli.group()
def cdi() -> None:
    """Show and check the file by which container runtimes learn of the slices."""


@cdi.command("list")
@_reading
def cdi_list(output: str) -> None:
    """List the CDI devices, the file they are in, and what is wrong with it."""
    from amdvgpud.core import wire
    from amdvgpud.ctl import show

    with _said_plainly():
        answer, raw = _client().get("/v1/cdi", wire.CdiView)
    _print_json(raw) if output == "json" else show.cdi(answer)


@cdi.command("show")
@click.argument("name", required=False, shell_complete=_complete_slices)
def cdi_show(name: str | None) -> None:
    """Print the CDI document as JSON, or only the device of the slice NAME."""
    import json

    from amdvgpud.core import wire

    with _said_plainly():
        answer, _ = _client().get("/v1/cdi", wire.CdiView)
    shown: object = answer.spec
    if name is not None:
        listed = (answer.spec or {}).get("devices")
        devices = listed if isinstance(listed, list) else []
        shown = next((d for d in devices if isinstance(d, dict) and d.get("name") == name), None)
        if shown is None:
            raise _Failed(f"{name}: no CDI device has that name; `amdvgpuctl cdi list` shows those there are", REFUSED)
    click.echo(json.dumps(shown, indent=2))


@cdi.command("validate")
@click.argument("name", required=False, shell_complete=_complete_slices)
def cdi_validate(name: str | None) -> None:
    """Check the CDI file, and say whether each container runtime here would resolve the slice NAME (or all).

    The file is compared with what the daemon means to have written; runtimes are judged by their version.
    """
    from amdvgpud.core import wire
    from amdvgpud.ctl.runtimes import findings

    with _said_plainly():
        answer, _ = _client().get("/v1/cdi", wire.CdiView)
        found = list(findings(answer, name))
    for finding in found:
        click.echo(f"{'ok' if finding.good else 'BAD'}  {finding.subject}: {finding.text}")
    if not all(finding.good for finding in found):
        sys.exit(REFUSED)


# --------------------------------------------------------------------------------------------------- events, status


@cli.command()
@click.option("-f", "--follow", is_flag=True, help="Go on and print each event as it happens.")
@click.option("--since", type=click.IntRange(0), default=0, metavar="ID", help="Only events after this one.")
@_reading
def events(follow: bool, since: int, output: str) -> None:
    """Print what has happened to slices, leases and GPUs since the daemon started. With JSON, one event a line."""
    import msgspec

    from amdvgpud.core import wire
    from amdvgpud.ctl import show

    def tell(item: wire.EventView) -> None:
        if output == "json":
            click.echo(msgspec.json.encode(item))
        else:
            show.event(item)

    with _said_plainly():
        client = _client()
        past, _ = client.get("/v1/events", wire.EventList, since=str(since))
        if past.resync:
            click.echo("amdvgpuctl: older events have been dropped; read the lists for the present state", err=True)
        for item in past.events:
            tell(item)
        if not follow:
            return
        for name, data in client.events(past.last_id):
            if name == "resync":
                click.echo("amdvgpuctl: events have been missed; read the lists for the present state", err=True)
            else:
                tell(msgspec.json.decode(data, type=wire.EventView))


@cli.command()
@_reading
def status(output: str) -> None:
    """Show the daemon: version, readiness, driver and warnings."""
    from amdvgpud.core import wire
    from amdvgpud.ctl import show

    with _said_plainly():
        answer, raw = _client().get("/v1/system", wire.SystemView)
    _print_json(raw) if output == "json" else show.system(answer)


@cli.command()
@click.option(
    "--image-root",
    type=click.Path(exists=True, file_okay=False),
    help="Look at an unpacked image too: whether the gate can get into its programs.",
)
@_reading
def doctor(image_root: str | None, output: str) -> None:
    """Say what this machine lacks for slices of its GPUs, and the cure of each lack. Changes nothing.

    Judged are driver, devices and their groups, kernel, cgroups, SELinux, the gate, the daemon, and whether each
    container runtime here would resolve the slices. Run it as the user who is to use them. Exit code 1: something is
    missing.
    """
    import dataclasses
    import json

    found = _diagnosis(image_root)
    healthy = all(f.state != "missing" for f in found)
    if output == "json":
        click.echo(json.dumps({"ok": healthy, "findings": [dataclasses.asdict(f) for f in found]}, indent=1))
    else:
        for finding in found:
            click.echo(f"{finding.state:<7}  {finding.subject}: {finding.text}")
            if finding.cure:
                click.echo(f"{'':7}  cure: {finding.cure}")
    if not healthy:
        sys.exit(REFUSED)


def _diagnosis(image_root: str | None = None) -> list[Finding]:
    from pathlib import Path

    from amdvgpud.ctl import runtimes
    from amdvgpud.ctl.doctor import ask_daemon, findings, read_probe

    image = None if image_root is None else Path(image_root)
    return list(findings(read_probe(ask_daemon(_client()), runtimes.installed(), image_root=image)))


@cli.command("support-bundle")
@click.argument("file", default="amdvgpud-support.tar.gz", type=click.Path(dir_okay=False))
def support_bundle(file: str) -> None:
    """Write what a report of trouble needs into FILE, a tar.gz: settings, state, metrics, events, log, sysfs, versions.

    Tokens, passwords and keys are taken out. Names of slices, holders of leases, PCI addresses and serial numbers are
    in it: look before you pass it on. Run it as root, else parts are missing; what is missing is told in the file.
    """
    from pathlib import Path

    from amdvgpud.ctl import bundle

    contents = bundle.members(_client(), _diagnosis())
    try:
        bundle.write(Path(file), bundle.archive(contents))
    except OSError as e:
        raise _Failed(f"{file}: {e.strerror}", REFUSED) from e
    lacking = contents["missing.txt"].decode().splitlines()
    click.echo(
        f"{file}: {len(contents)} files" + (f"; missing, as told in missing.txt: {len(lacking)}" if lacking else "")
    )


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell, as in: source <(amdvgpuctl completion bash)."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:  # pragma: no cover - click has had all three since 8.0
        raise _Failed(f"{shell}: this click has no completion for it", USAGE)
    click.echo(kind(cli, {}, "amdvgpuctl", "_AMDVGPUCTL_COMPLETE").source())


def main() -> NoReturn:
    """The console script. Ends by ``sys.exit`` with one of ``EXIT_CODES``; never by a traceback."""
    try:
        code = cli.main(prog_name="amdvgpuctl", standalone_mode=False)
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except click.Abort:
        sys.exit(128 + signal.SIGINT)
    except Exception as e:
        # A fault of ours. The line says where, for the report; what lies above it is of no use to who reads it here.
        at = traceback.extract_tb(e.__traceback__)[-1]
        where = f"{os.path.basename(at.filename)}:{at.lineno}"  # noqa: PTH119
        click.echo(f"amdvgpuctl: this is a fault of the program: {type(e).__name__}: {e} ({where})", err=True)
        sys.exit(REFUSED)
    sys.exit(code if isinstance(code, int) else OK)
