"""Run a user's training script in this process, as `python script.py` would, with a task for its `attach`."""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

from paceline.comm.network import LOOPBACK, choose_interface
from paceline.errors import WorkloadError
from paceline.training.parity.task import exact_kernels
from paceline.training.rank_setup import rank_seed
from paceline.training.scripts.script_parity import OracleCheckTask, OracleTask, ParityTask
from paceline.training.scripts.script_task import ScriptFinished, ScriptTask, set_script_task
from paceline.training.scripts.script_timing import TimingTask
from paceline.workloads.random_state import seed_everything

SCRIPT_TASKS: dict[str, type[ScriptTask]] = {
    "train": TimingTask,
    "prove": ParityTask,
    "oracle": OracleTask,
    "prove_oracle": OracleCheckTask,
}
LINES_TO_SHOW = 12


def run_script(task: ScriptTask, iface: str | None) -> None:
    """Run the script until its task is finished; raise if the script ends earlier."""
    script, rank = task.script, int(os.environ["RANK"])
    set_script_task(task)
    _choose_interface(iface)
    # The same under every strategy, different on each rank and repeat.
    seed_everything(rank_seed(task.config.seed, rank))
    sys.argv = [script.path, *script.args]
    sys.path.insert(0, str(Path(script.path).resolve().parent))
    try:
        with exact_kernels() if task.exact_kernels else nullcontext():
            runpy.run_path(script.path, run_name="__main__")
    except ScriptFinished:
        return
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise WorkloadError(
                f"{script.name} ended with exit code {leaving.code}.",
                detail=_last_lines(task, rank),
                hint="run the script by itself to find the cause",
            ) from None
    task.check_finished()


def _choose_interface(iface: str | None) -> None:
    """Make the script's process group, if it creates one, use the interface that Paceline would choose."""
    here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    chosen = iface or choose_interface(os.environ.get("MASTER_ADDR", LOOPBACK), all_on_this_host=here).name
    os.environ.setdefault("GLOO_SOCKET_IFNAME", chosen)


def _last_lines(task: ScriptTask, rank: int) -> str:
    """Return the last lines that the script printed, for example argparse's error."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = task.folder.log_file(rank)
    return "\n".join(log.read_text(errors="replace").splitlines()[-LINES_TO_SHOW:]) if log.exists() else ""
