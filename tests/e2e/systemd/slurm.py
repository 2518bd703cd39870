"""The samples of docs/guide/slurm under a real Slurm of one node: jobs get their slice, are held to it, give it back.

Debian's Slurm and munge under systemd; simulated GPUs. How it is run: machine.py.
"""

from __future__ import annotations

import fcntl
import json
import re
import socket
import struct
import sys
from pathlib import Path

from tests.e2e.systemd.machine import KFDCLIENT, check, install, main, names, run, show, simulate, until

HOST = socket.gethostname()
ADDRESS = "10.0.0.1"
"""Not 127.0.0.1: Slurm asks for addresses by AI_ADDRCONFIG, which gives none on a machine that has loopback only."""
SAMPLES = "/usr/share/amdvgpud/slurm"
# No cgroups: this test bed's have no controllers.
CONFIGURATION = f"""
ClusterName=one
SlurmctldHost={HOST}({ADDRESS})
SlurmUser=slurm
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
ReturnToService=2
NodeName={HOST} NodeAddr={ADDRESS} CPUs=2 State=UNKNOWN
PartitionName=all Nodes={HOST} Default=YES State=UP
PrologFlags=Alloc
Prolog={SAMPLES}/prolog
TaskProlog={SAMPLES}/task-prolog
Epilog={SAMPLES}/epilog
"""
# What answers for the simulated GPU stands behind the gate that task-prolog brings.
JOB = f"""#!/bin/sh
echo "slice $AMDVGPU_SLICE"
export SOFTKFD_ROOT=/run/amdvgpud/simulated LD_PRELOAD="$LD_PRELOAD:/usr/lib/amdvgpu/libsoftkfd.so"
{KFDCLIENT} --step 256M --count 8
"""


def state() -> str:
    return run("sinfo", "--noheader", "--format=%T").strip()


def submit(*options: str, wait: bool = True) -> tuple[str, str]:
    """Job number and, where ``wait``, what it wrote."""
    waiting = ["--wait"] if wait else []
    argv = [
        "setpriv",
        "--reuid=carol",
        "--regid=carol",
        "--init-groups",
        "env",
        "-C",
        "/home/carol",
        "HOME=/home/carol",
    ]
    said = run(*argv, "sbatch", *waiting, "--output=out-%j", *options, "/home/carol/job.sh", code=None)
    number = re.search(r"Submitted batch job (\d+)", said)
    assert number is not None, said
    out = Path(f"/home/carol/out-{number.group(1)}")
    return number.group(1), out.read_text() if wait else ""


@check
def slurm_and_the_daemon_run() -> None:
    install()
    simulate("mi300x")
    run("useradd", "--create-home", "--shell=/bin/sh", "carol")
    Path("/home/carol/job.sh").write_text(JOB)
    with socket.socket() as line:  # SIOCSIFADDR, netdevice(7): a second address of the loopback interface
        wanted = struct.pack("16sHH4s16x", b"lo:1", socket.AF_INET, 0, socket.inet_aton(ADDRESS))
        fcntl.ioctl(line, 0x8916, wanted)
    Path("/etc/hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS} {HOST}\n")
    Path("/etc/slurm/slurm.conf").write_text(CONFIGURATION)
    Path("/etc/slurm/cgroup.conf").write_text("CgroupPlugin=disabled\n")
    run("install", "--directory", "--owner=slurm", "/var/lib/slurm/slurmctld", "/var/lib/slurm/slurmd")
    run("systemctl", "restart", "munge.service")
    for unit in ("slurmctld.service", "slurmd.service"):
        run("systemctl", "restart", unit, code=None)
        said = run("journalctl", "--no-pager", "--output=cat", f"--unit={unit}")
        assert show(unit, "ActiveState") == ["active"], said
    until("an idle node", lambda: state() == "idle")
    print(f"    # {run('sinfo', '--version').strip()}")


@check
def a_job_is_given_a_slice_is_held_to_it_and_gives_it_back() -> None:
    number, said = submit("--comment=amdvgpu:vram=1GiB,compute=25%")
    first, *lines = said.splitlines()
    assert first == f"slice job-{number}", said
    results = [line["result"] for line in map(json.loads, lines) if line["op"] == "alloc"]
    assert results == ["ok"] * 4 + ["ENOMEM"], said
    until("no slice", lambda: names() == [])


@check
def a_job_that_asks_for_nothing_is_left_alone() -> None:
    _, said = submit()
    assert said.startswith("slice \n"), said
    assert names() == []


@check
def a_job_that_cannot_be_served_does_not_start_and_its_node_is_drained() -> None:
    until("an idle node", lambda: state() == "idle")
    number, _ = submit("--comment=amdvgpu:vram=900GiB", wait=False)
    until("a drained node", lambda: state().startswith("drain"))
    assert not Path(f"/home/carol/out-{number}").exists()
    assert "Prolog" in run("sinfo", "--noheader", "--list-reasons", "--format=%E")
    run("scancel", number)
    run("scontrol", "update", f"nodename={HOST}", "state=resume")


if __name__ == "__main__":
    sys.exit(main())
