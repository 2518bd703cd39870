"""amdvgpud: the daemon's command line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from amdvgpud import __version__
from amdvgpud.assembly import INSTALLED_LIBRARY, assemble, rehearse
from amdvgpud.core.errors import AmdvgpuError, HostFailure
from amdvgpud.daemon import serve
from amdvgpud.host.cdi import CdiFile, replace_file
from amdvgpud.host.cdi_spec import parse_spec, proven, without_hooks
from amdvgpud.host.runtime_config import read_cdi_words
from amdvgpud.host.systemd import claim_machine
from amdvgpud.settings import SETTINGS, Settings, read_settings, shown
from amdvgpud.sim.models import table_rows


class _JournalFormatter(logging.Formatter):
    """Lines for the journal: the priority that it sorts by in front, no time of our own (sd-daemon(3))."""

    _PRIORITY: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}

    def format(self, record: logging.LogRecord) -> str:
        return f"<{self._PRIORITY.get(record.levelno, 5)}>{super().format(record)}"


def _start_logging(level: str) -> None:
    handler = logging.StreamHandler()
    if "JOURNAL_STREAM" in os.environ:
        handler.setFormatter(_JournalFormatter("%(name)s: %(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _flags_of_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """One option for each setting, from the one table. What is not given is not passed, so other sources count."""
    for setting in reversed(list(SETTINGS.values())):
        names = [setting.flag, setting.key.replace(".", "__")]
        # Not click's own default: what is not given must not count as given.
        text = f"{setting.meaning}  [default: {json.dumps(setting.default)}]"
        command = click.option(*names, metavar=setting.form, default=None, help=text)(command)
    return click.option("--config", "file", type=click.Path(path_type=Path), help="Read this file, not the default.")(
        command
    )


def _settings(file: Path | None, flags: Mapping[str, str | None]) -> Settings:
    given = {key.replace("__", "."): text for key, text in flags.items() if text is not None}
    return read_settings(os.environ, given, file)


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="amdvgpud")
@_flags_of_settings
@click.pass_context
def cli(context: click.Context, /, file: Path | None, **flags: str | None) -> None:
    """Share the AMD GPUs of this machine: serve slices of them until told to stop.

    Each option is also a key of /etc/amdvgpud/amdvgpud.toml and a variable AMDVGPUD_<KEY>.
    """

    def read_again() -> Settings:
        return _settings(file, flags)

    context.obj = read_again
    if context.invoked_subcommand is None:
        settings = read_again()
        _start_logging(settings.log_level)
        asyncio.run(serve(settings, read_again))


@cli.group()
def sim() -> None:
    """Simulated machines."""


@sim.command("models")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
def sim_models(output: str) -> None:
    """List the GPU models that --simulate knows; a value with '?' has no source."""
    rows = table_rows()
    if output == "json":
        click.echo(json.dumps(rows, indent=1))
        return
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    for row in [{key: key.upper() for key in widths}, *rows]:
        click.echo("  ".join(row[key].ljust(width) for key, width in widths.items()).rstrip())


@cli.group()
def config() -> None:
    """The configuration."""


@config.command("check")
@click.pass_obj
def config_check(read: Callable[[], Settings]) -> None:
    """Read all sources and say whether the daemon would start with them. Touches nothing that runs."""
    settings = read()
    rehearse(settings)
    changed = [key for key, origin in settings.origin.items() if origin != "default"]
    click.echo(f"The configuration is valid; not at their defaults: {', '.join(changed) or 'none'}.")


@config.command("show")
@click.option("--origin", is_flag=True, help="Say where each value came from.")
@click.pass_obj
def config_show(read: Callable[[], Settings], origin: bool) -> None:
    """Show each setting in force, as TOML."""
    settings = read()
    for key, value in shown(settings).items():
        line = f"{key} = {json.dumps(value)}"
        click.echo(f"{line}  # {settings.origin[key]}" if origin else line)


@cli.group()
def kube() -> None:
    """The Kubernetes cluster."""


@kube.command("withdraw")
@click.pass_obj
def kube_withdraw(read: Callable[[], Settings]) -> None:
    """Tell HAMi's scheduler that no GPU of this node is healthy: before the node goes for good.

    A daemon that runs writes the registration again, so stop it first. Pods that run are left alone.
    """
    from amdvgpud.kubernetes import withdraw

    settings = read()
    _start_logging(settings.log_level)
    name = asyncio.run(withdraw(settings, os.environ))
    click.echo(f"The GPUs of node {name} are withdrawn from HAMi's scheduler.")


@kube.command("own-devices")
@click.pass_obj
def kube_own_devices(read: Callable[[], Settings]) -> None:
    """Serve amdvgpu.io/daemon, by which the kubelet lets the daemon's pod at the GPUs' device nodes.

    Until told to stop. For a DaemonSet beside the daemon's own. Opens no GPU and needs none of the daemon's rights.
    """
    from amdvgpud.kubernetes import offer_own_devices

    settings = read()
    _start_logging(settings.log_level)

    async def offer() -> None:
        offering = asyncio.create_task(offer_own_devices(settings, os.environ, read_cdi_words))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, offering.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await offering

    asyncio.run(offer())


@cli.group()
def cdi() -> None:
    """The CDI file."""


@cdi.command("refresh")
@click.option("--oneshot", is_flag=True, required=True, help="Do it once and end: there is no other way yet.")
@click.pass_obj
def cdi_refresh(read: Callable[[], Settings], oneshot: bool) -> None:
    """Bring the files of all stored slices and the CDI file up to date without a daemon.

    For those who want no daemon to run all the time: slices made while one ran are found again after a reboot.
    """
    settings = read()
    _start_logging(settings.log_level)

    async def refresh() -> None:
        lock = claim_machine(settings.run_dir)
        try:
            node = assemble(settings).node
            await node.start()
            status = node.view().cdi
        finally:
            os.close(lock)
        if status.error is not None:
            raise HostFailure(f"{status.path}: {status.error}")
        click.echo(f"{status.path}: {'written' if status.written else 'no slice, so no file'}")

    asyncio.run(refresh())


@cdi.command("drop-hooks")
@click.pass_obj
def cdi_drop_hooks(read: Callable[[], Settings]) -> None:
    """Take amdvgpu-hook out of the CDI file, as must be done before the program is removed.

    A runtime fails each start whose hook is missing. For removals of the package, after the daemon has been stopped:
    one that runs leaves the hook out by itself when it has gone, but only at its next look.
    """
    settings = read()
    path = CdiFile(settings.cdi_dir, run_dir=settings.run_dir, library=INSTALLED_LIBRARY, kind=settings.cdi_kind).path
    try:
        spec = parse_spec(path.read_bytes())
        replace_file(path, proven(without_hooks(spec)))
    except FileNotFoundError:
        click.echo(f"{path}: no slice, so no file")
        return
    except OSError as error:
        raise HostFailure(f"{path}: the hooks are still in it: {error}") from error
    click.echo(f"{path}: names no hook")


def main() -> None:
    """Entry point. Exit codes: 0 ended as asked, 1 refused by the machine or the state, 2 wrong words."""
    try:
        cli(prog_name="amdvgpud", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except AmdvgpuError as error:
        click.echo(f"amdvgpud: {error}", err=True)
        sys.exit(2 if error.code == "invalid" else 1)


if __name__ == "__main__":
    main()
