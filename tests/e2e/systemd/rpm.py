"""The rpm packages: what their scriptlets do at installation, upgrade and removal. How it is run: machine.py.

On Debian 12, by Debian's rpm and without dependencies: no mirror of Fedora's or its kin was at hand. So it says nothing
of the names of packages that are needed, of SELinux, or of another distribution's Python.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.e2e.systemd.machine import (
    SPEC,
    api,
    check,
    ctl,
    files_of,
    install,
    main,
    main_pid,
    names,
    packages,
    program,
    run,
    show,
    simulate,
    until,
    used_bytes,
)

NAMES = ("amdvgpud", "amdvgpuctl", "libamdvgpu")


@check
def the_packages_install_and_presets_put_the_daemon_on() -> None:
    install()
    run("rpm", "--verify", "--nodeps", *NAMES)
    assert run("systemctl", "is-enabled", "amdvgpud.service", "amdvgpud.socket").split() == ["enabled", "enabled"]
    assert run("systemctl", "is-enabled", "amdvgpud-cdi-refresh.service", code=1).strip() == "disabled"
    assert show("amdvgpud.service", "ActiveState", "NRestarts") == ["active", "0"]
    assert run("getent", "group", "amdvgpu").split(":")[2] == str(Path("/run/amdvgpud/api.sock").stat().st_gid)


@check
def a_slice_holds_a_program() -> None:
    simulate("2*mi300x")
    ctl("slice", "create", "alice", "--gpu", "0", "--vram", "4GiB", "--compute", "25%")
    with program("alice", 2):
        assert used_bytes("alice") == 2 << 30


@check
def an_upgrade_restarts_it_and_keeps_slices_ledgers_and_settings() -> None:
    config = Path("/etc/amdvgpud/amdvgpud.toml")
    config.write_text('log_level = "debug"\n')
    with program("alice", 1):
        before, daemon, version = files_of("alice"), main_pid(), api("/v1/system")["version"]
        run("rpm", "--upgrade", "--nodeps", *packages("later"))
        until("the new daemon", lambda: main_pid() not in (0, daemon) and names() == ["alice"])
        assert version != "99.0.0"
        assert api("/v1/system")["version"] == "99.0.0"
        assert (files_of("alice"), used_bytes("alice")) == (before, 1 << 30)
    assert config.read_text() == 'log_level = "debug"\n'
    assert run("systemctl", "is-enabled", "amdvgpud.service").strip() == "enabled"


@check
def removal_stops_it_and_leaves_no_program_behind() -> None:
    run("rpm", "--erase", "--nodeps", *NAMES)
    assert run("systemctl", "is-active", "amdvgpud.service", code=None).strip() == "inactive"
    assert [
        path for path in ("/usr/lib/amdvgpud", "/usr/lib/amdvgpu", "/usr/bin/amdvgpud") if Path(path).exists()
    ] == []
    failed = run("systemctl", "list-units", "--failed", "--no-legend", "--plain", "*amdvgpu*")
    assert failed == ""
    assert "amdvgpu-hook" not in SPEC.read_text()


if __name__ == "__main__":
    sys.exit(main())
