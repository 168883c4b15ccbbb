"""What a rank's process does: `python -m paceline.launch.rank JOB.json`, started by torch's elastic launcher."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from paceline.config.emulation import CGROUP_VARIABLE
from paceline.launch.emulation.cgroup import enter
from paceline.launch.failures import record_failure
from paceline.launch.job import Job

MODULE = "paceline.launch.rank"
LOCAL_RANK, LOCAL_SIZE = "PACELINE_LOCAL_RANK", "PACELINE_LOCAL_SIZE"
"""Where the launching process counts the ranks of a host that it does not start all of."""
SHARING = "PACELINE_SHARING"
"""How many ranks share this one's cores."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Does every run of the job, then leaves; a failure is written down for the launcher."""
    launcher = os.getppid()
    job = Job.read(Path(sys.argv[1]))
    rank = int(os.environ["RANK"])
    _die_with(launcher)
    _count_all_of_the_host()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends us at once; the launcher tells the user.
    _log_to(job.folder.log_file(rank))
    faulthandler.register(signal.SIGTERM, chain=True, all_threads=False)  # A rank that hangs says where.
    place = JobProgress()
    try:
        if job.script is None:
            work(job, place)
        else:
            work_for_script(job)
    except BaseException as error:
        record_failure(error, rank, job.folder.error_file(rank), place.run)
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _leave(code: int) -> NoReturn:
    """Ends the process, without running the destructors of C++ libraries.

    Now and then they abort it ("terminate called without an active exception"): one that is done would count as failed,
    and one that has failed as ended by a signal, whatever it wrote down. Everything is written by now.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass
class JobProgress:
    """How far a rank has come in its job."""

    run: int | None = None
    """The run it is in; None before the first."""


def work(job: Job, place: JobProgress) -> None:
    """Joins the others, does every run of the job, leaves."""
    _import_torch()
    from paceline.comm import join_world, leave_world
    from paceline.doctor.examine import examine_machines, examine_run
    from paceline.doctor.reach import check_reach
    from paceline.training.parity.task import prove_run
    from paceline.training.run import run

    examining: dict[str, Callable[..., None]] = {"examine": examine_run, "examine_machines": examine_machines}
    task = (examining | {"train": run, "prove": prove_run})[job.task]
    meet = check_reach if job.task in examining else None
    world = join_world(timeout_s=job.timeout, iface=job.iface, meet=meet)
    _enter_host()
    for number, (config, folder) in enumerate(job.runs):
        place.run = number
        task(config, world, folder, threads=job.threads, number=number, command=job.command)
    leave_world()


def work_for_script(job: Job) -> None:
    """Runs the user's script, whose `attach` joins the others."""
    _import_torch()
    from paceline.training.scripts.run_script import SCRIPT_TASKS, run_script

    assert job.script is not None
    _enter_host()
    ((config, folder),) = job.runs
    kind = SCRIPT_TASKS[job.task]
    run_script(kind(script=job.script, config=config, folder=folder, command=job.command, oracle=job.oracle), job.iface)


def _import_torch() -> None:
    """Imports it without looking for garbage among the millions of objects that makes: 0.8 s of nothing found."""
    gc.disable()
    import torch._dynamo  # noqa: F401  (optimisers import it when first used: a second that would fall into a run)

    gc.freeze()
    gc.enable()


def _count_all_of_the_host() -> None:
    """Counts this rank among all of its host, and not among those of one launching process."""
    first = int(os.environ.pop(LOCAL_RANK, 0))
    os.environ["LOCAL_RANK"] = str(first + int(os.environ["LOCAL_RANK"]))
    os.environ["LOCAL_WORLD_SIZE"] = os.environ.pop(LOCAL_SIZE, os.environ["LOCAL_WORLD_SIZE"])


def _enter_host() -> None:
    """Takes this rank's part of an emulated host's cores, and no more, before anything is computed.

    Importing torch and finding the others comes before it: nobody wants to wait for these on half a core.
    """
    folder = os.environ.get(CGROUP_VARIABLE)
    if folder:
        enter(Path(folder))


def _die_with(launcher: int) -> None:
    """Has the kernel end us with our launcher, even if that is killed without a chance to clean up."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # It died before we asked.
            os._exit(1)


def _log_to(file: Path) -> None:
    """Sends all that this process prints, C++ libraries included, to the rank's own log."""
    with file.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


if __name__ == "__main__":
    main()
