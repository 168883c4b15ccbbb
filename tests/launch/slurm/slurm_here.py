"""Real Slurm of two nodes on this host, for the duration of the tests that need one."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
NODES = ("n1", "n2")
"""Names that do not resolve; their addresses are in Slurm's configuration only."""
CPUS = 8
START_S = 20.0
LIMIT_S = 120.0

CONFIGURATION = """\
ClusterName=here
FirstJobId={first_job}
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
{listening}
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=10
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=5 State=UP
"""


def missing_programs() -> list[str]:
    """Return the missing programs; Debian's packages slurm-wlm and munge contain all."""
    return [name for name in PROGRAMS if find_program(name) is None]


def find_program(name: str) -> str | None:
    """Return the path of a program; daemons are in sbin, which is not in the PATH of users."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


@dataclass
class Slurm:
    """Two nodes, a controller, and the authentication daemon."""

    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Environment for commands of this Slurm, without the variables of a Slurm that runs the tests."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons, and wait until both nodes accept jobs."""
        self._configure()
        key, socket_file = self.folder / "munge.key", self.folder / "munge.socket"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [f"--{what}-file={self.folder / f'munge.{what}'}" for what in ("pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket_file}", *files)
        self._wait(socket_file.exists, "munged")
        self._daemon("slurmctld", "-D", "-c")
        for name in NODES:
            self._daemon("slurmd", "-D", "-N", name)
        self._wait(lambda: self.run("sinfo", "--noheader", "--format=%t %D").split() == ["idle", "2"], "two idle nodes")

    def run(self, *command: str, cwd: Path | None = None, limit_s: float = LIMIT_S) -> str:
        """Run a command in this Slurm; return its stdout and stderr."""
        done = self.call(*command, cwd=cwd, limit_s=limit_s)
        return done.stdout + done.stderr

    def call(
        self, *command: str, cwd: Path | None = None, limit_s: float = LIMIT_S, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in this Slurm; return its exit code and output."""
        return subprocess.run(
            command,
            cwd=cwd or self.folder,
            env=self.environment | (env or {}),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def stop(self) -> None:
        """Cancel all jobs, then kill the daemons, which have no state to save."""
        if len(self.daemons) > 1:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                self.run("scancel", f"--user={_user()}", limit_s=5)
                deadline = time.monotonic() + 10
                while self.run("squeue", "--noheader", limit_s=5).strip() and time.monotonic() < deadline:
                    time.sleep(0.1)
        for daemon in reversed(self.daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait(5)

    def _configure(self) -> None:
        (self.folder / "state").mkdir()
        port, *ports = _free_ports(1 + len(NODES))
        listening, address = _listening()
        nodes = [
            f"NodeName={name} NodeHostname=localhost NodeAddr={address} Port={port} CPUs={CPUS} RealMemory=512"
            for name, port in zip(NODES, ports, strict=True)
        ]
        text = CONFIGURATION.format(
            host=socket.gethostname(),
            address=address,
            listening=listening,
            port=port,
            user=_user(),
            folder=self.folder,
            nodes="\n".join(nodes),
            first_job=random.randrange(1, 10_000),  # The port of a step follows from it.
        )
        (self.folder / "slurm.conf").write_text(text)

    def _daemon(self, name: str, *arguments: str) -> None:
        program = find_program(name)
        assert program is not None
        log = self.folder / f"{name}-{len(self.daemons)}.output"
        with log.open("wb") as output:
            self.daemons.append(
                subprocess.Popen(
                    [program, *arguments], env=self.environment, stdout=output, stderr=output, start_new_session=True
                )
            )

    def _wait(self, holds: object, what: str) -> None:
        assert callable(holds)
        deadline = time.monotonic() + START_S
        while not holds():
            ended = [daemon.args for daemon in self.daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"no {what} within {START_S:g} s; ended: {ended}\n{self._logs()}")
            time.sleep(0.05)

    def _logs(self) -> str:
        files = sorted([*self.folder.glob("*.output"), *self.folder.glob("*.log")])
        return "\n".join(f"{file.name}:\n{file.read_text(errors='replace')[-2000:]}" for file in files)


@contextmanager
def running_slurm() -> Iterator[Slurm]:
    """Run Slurm for the duration of a `with` block, in a folder with a short name (socket paths: 107 characters)."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        slurm = Slurm(Path(folder))
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.stop()


def _free_ports(count: int) -> Sequence[int]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in servers]


def _listening() -> tuple[str, str]:
    """Return Slurm's communication parameters and the address for its nodes.

    Slurm can listen on the address of the host's name or on all addresses. Use the first if it is a loopback address.
    """
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = ""
    only_there = "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny"
    return (only_there, address) if address.startswith("127.") else ("", "127.0.0.1")


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name
