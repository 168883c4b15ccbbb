"""Rank process: `python -m paceline.launch.rank JOB.json`, started by torch's elastic launcher."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    # Before numpy is imported, whose threads inherit this: a signal goes to any thread that does not block it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

from paceline.config.emulation import CGROUP_VARIABLE
from paceline.errors import PreemptedError, RecordError
from paceline.launch.emulation.cgroup import enter
from paceline.launch.faults.failures import FULL_DISK_EXIT_CODE, record_failure
from paceline.launch.job import Job
from paceline.measure.start_up import START_UP
from paceline.records.growing_file import full_disk_error
from paceline.signing import Signer, job_signer, keep_job_key

MODULE = "paceline.launch.rank"
LOCAL_RANK, LOCAL_SIZE = "PACELINE_LOCAL_RANK", "PACELINE_LOCAL_SIZE"
"""Variables that a launcher sets for its ranks: local rank of its first rank, and ranks on the whole host."""
RANKS_ON_CORES = "PACELINE_SHARING"
"""Variable with the number of ranks that share the cores of this rank."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the job, then exit; on failure, write the error file that the launcher reads."""
    launcher_pid = os.getppid()
    job = Job.read(Path(sys.argv[1]))
    START_UP.begin(job.launched_at_s)
    START_UP.end_of("starting processes")
    rank = int(os.environ["RANK"])
    keep_job_key(Signer.take_from(os.environ))
    _exit_with_parent(launcher_pid)
    _set_local_rank_on_host()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends ranks at once; the launcher reports it.
    progress = JobProgress()
    try:
        _prepare(job, rank, launcher_pid)
        with _reporting_status(job, rank):
            if job.script is None:
                run_job(job, progress)
            else:
                run_script_job(job)
    except BaseException as error:
        _exit_process(_report_failure(error, job, rank, progress))
    _exit_process(0)


def _prepare(job: Job, rank: int, launcher_pid: int) -> None:
    """Direct output to the log, and print stacks there if this process is ended."""
    try:
        with full_disk_error(job.folder.log_file(rank)):
            _redirect_output(job.folder.log_file(rank))
    except RecordError:
        _exit_process(FULL_DISK_EXIT_CODE)
    faulthandler.enable()  # Print the stacks of all threads if native code ends this process.
    faulthandler.register(signal.SIGQUIT, all_threads=False)  # Print the stack of a rank that does not answer.
    if job.stops_on_request:
        leave_stop_signals_to(launcher_pid)
    else:
        faulthandler.register(signal.SIGTERM, chain=True, all_threads=False)  # Print the stack of a rank that hangs.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _report_failure(error: BaseException, job: Job, rank: int, progress: JobProgress) -> int:
    """Write the error file and print the traceback; return the exit code. The disk of both may be full."""
    with suppress(OSError):
        traceback.print_exception(error)
    try:
        record_failure(error, rank, job.folder.error_file(rank), progress.run)
    except RecordError:
        return FULL_DISK_EXIT_CODE
    return 0 if isinstance(error, PreemptedError) else 1


def _exit_process(code: int) -> NoReturn:
    """End the process without running the destructors of C++ libraries.

    These sometimes abort the process ("terminate called without an active exception"). A rank that is done would then
    count as failed, and one that failed as killed by a signal. All files are written at this point.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # The disk of the log is full.
            stream.flush()
    os._exit(code)


@dataclass
class JobProgress:
    """Progress of a rank in its job."""

    run: int | None = None
    """Index of the current run; None before the first."""


@contextmanager
def _reporting_status(job: Job, rank: int) -> Iterator[None]:
    """Report to the watchdog what this rank does, for the duration of a `with` block.

    The last report is that it has done all its work. A rank that fails ends at once.
    """
    if not job.hang_timeout:
        yield
        return
    _import_torch(job)
    from paceline.comm.watchdog.reporter import Reporter, connect

    try:
        store = connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), job_signer())
    except RuntimeError:  # Joining the other ranks fails next, with an error that says why.
        yield
        return
    reporter = Reporter(store, rank, job.hang_timeout)
    reporter.start()
    yield
    reporter.stop()


def run_job(job: Job, progress: JobProgress) -> None:
    """Connect to the other ranks, execute every run of the job, disconnect."""
    _import_torch(job)
    from paceline.comm import join_world, leave_world
    from paceline.doctor.examine import examine_machines, examine_run
    from paceline.doctor.reach import check_reach
    from paceline.measure.activity import ACTIVITY
    from paceline.training.parity.task import prove_run
    from paceline.training.run import run

    examining: dict[str, Callable[..., None]] = {"examine": examine_run, "examine_machines": examine_machines}
    task = (examining | {"train": run, "prove": prove_run})[job.task]
    before_connect = check_reach if job.task in examining else None
    START_UP.end_of("importing torch")
    world = join_world(timeout_s=job.timeout, iface=job.iface, before_connect=before_connect)
    if world.rank == 0:
        job.folder.mark_ready()
    _enter_host_cgroup()
    START_UP.end_of("connecting ranks")
    began_s = job.launched_at_s
    for number, (config, folder) in enumerate(job.runs):
        progress.run = number
        ACTIVITY.reset("preparing the run")
        more: dict[str, Any] = {"resume": Path(job.resume)} if job.resume else {}
        if job.precision_file and job.task != "prove":
            more["precision_file"] = Path(job.precision_file)
        more |= {"launched_at_s": began_s} if task is run else {}
        task(config, world, folder, threads=job.threads, number=number, command=job.command, **more)
        began_s = time.time()
        START_UP.begin(began_s)
    leave_world()


def run_script_job(job: Job) -> None:
    """Run the user's script, whose call of `attach` connects to the other ranks."""
    _import_torch(job)
    from paceline.training.scripts.run_script import SCRIPT_TASKS, run_script

    assert job.script is not None
    _enter_host_cgroup()
    ((config, folder),) = job.runs
    kind = SCRIPT_TASKS[job.task]
    run_script(kind(script=job.script, config=config, folder=folder, command=job.command, oracle=job.oracle), job.iface)


def _import_torch(job: Job) -> None:
    """Import torch without garbage collection: the import creates millions of objects, all of which stay.

    A run imports torch's compiler only if it uses it (`training/compiler_import.py`). Otherwise it is imported here:
    optimisers of a script would import it in the first step, which takes a second.
    """
    gc.disable()
    import torch

    if job.script is not None or job.task != "train":
        import torch._dynamo  # noqa: F401
    gc.freeze()
    gc.enable()


def _set_local_rank_on_host() -> None:
    """Change LOCAL_RANK and LOCAL_WORLD_SIZE from the ranks of one launcher to all ranks of the host."""
    first = int(os.environ.pop(LOCAL_RANK, 0))
    os.environ["LOCAL_RANK"] = str(first + int(os.environ["LOCAL_RANK"]))
    os.environ["LOCAL_WORLD_SIZE"] = os.environ.pop(LOCAL_SIZE, os.environ["LOCAL_WORLD_SIZE"])


def _enter_host_cgroup() -> None:
    """Enter the cgroup of an emulated host, which limits its cores, before any computation.

    Importing torch and connecting to other ranks happen before this, since both would be slow on half a core.
    """
    folder = os.environ.get(CGROUP_VARIABLE)
    if folder:
        enter(Path(folder))


def _exit_with_parent(launcher_pid: int) -> None:
    """Make the kernel kill this process when its launcher ends, even if the launcher is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher_pid:  # The launcher ended before prctl.
            os._exit(1)


def leave_stop_signals_to(launcher_pid: int) -> None:
    """Ignore SIGTERM and SIGUSR1, which ask the launcher to stop this job, unless the launcher itself sends SIGTERM.

    Slurm sends a signal to all processes of a task, and systemd to all of a service. Processes that this one forks,
    such as the workers of a DataLoader, ignore them too, unless the launcher or their own parent process sends SIGTERM.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.register_at_fork(after_in_child=lambda: _end_on_sigterm_from({launcher_pid, os.getppid()}))
    _end_on_sigterm_from({launcher_pid}, before_end=faulthandler.dump_traceback)


def _end_on_sigterm_from(senders: set[int], before_end: Callable[[], None] = lambda: None) -> None:
    """Let SIGTERM end this process only if one of these processes sends it.

    A handler does not know the sender, so a thread waits for the signal, which all other threads block. Stacks that
    `before_end` prints have that of the main thread last.
    """

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid not in senders:
            pass
        before_end()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="paceline-sigterm").start()


def _redirect_output(file: Path) -> None:
    """Redirect stdout and stderr of this process, including C++ libraries, to the rank's log file."""
    with file.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


if __name__ == "__main__":
    main()
