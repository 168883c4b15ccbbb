"""Slurm step: the launcher position of a task that `srun` started; every task starts one rank. Free of torch.

`srun` sets the position of each task in `SLURM_STEP_…`, `SLURM_NODEID` and `SLURM_LOCALID`. A batch script and the
shells of an allocation have Slurm's variables too, but are not tasks of a step. Paceline then starts ranks as on a
single host without Slurm.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config import LaunchConfig
from paceline.config.whole_number import whole_number
from paceline.errors import LaunchError, UsageError
from paceline.formatting import plural
from paceline.launch.launcher_process import LauncherProcess
from paceline.launch.slurm.scontrol import scontrol

FIRST_PORT = 12288
PORT_COUNT = 16384
"""Launcher 0 listens on a port from 12288 to 28671: below the ephemeral ports, and clear of Slurm's ports."""
PORTS_PER_JOB = 64
"""Distance between the first ports of consecutive jobs: their first 64 steps use different ports."""
MOST_NODES = 1 << 16
"""Most nodes of a step; a list with more is not one of Slurm's."""

_NODES = re.compile(r"(?:[^\[\],\s]|\[\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*\])+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """Step that `srun` started, and the position of this process in it."""

    job: int
    number: int
    nodes: tuple[str, ...]
    tasks_per_node: tuple[int, ...]
    node: int
    local_task: int

    @property
    def tasks(self) -> int:
        """Number of tasks on all nodes."""
        return sum(self.tasks_per_node)

    @property
    def port(self) -> int:
        """Port on which launcher 0 listens."""
        return FIRST_PORT + (self.job * PORTS_PER_JOB + self.number) % PORT_COUNT

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> SlurmStep | None:
        """Return the step of which this process is a task; None if it is not a task.

        Programs that a task starts inherit the variables of the step, including job scripts that are submitted from a
        shell. `SLURM_STEP_NUM_TASKS` equals `SLURM_NTASKS` only in the step itself.
        """
        text = environment.get("SLURM_STEP_NUM_TASKS")
        if text is None or text != environment.get("SLURM_NTASKS"):
            return None
        step = cls(
            job=_read_number(environment, "SLURM_JOB_ID"),
            number=_read_number(environment, "SLURM_STEP_ID"),
            nodes=tuple(expand_nodes(environment.get("SLURM_STEP_NODELIST", ""))),
            tasks_per_node=tuple(expand_tasks(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))),
            node=_read_number(environment, "SLURM_NODEID"),
            local_task=_read_number(environment, "SLURM_LOCALID"),
        )
        nodes = len(step.tasks_per_node)
        if len(step.nodes) != nodes or step.node >= nodes or step.local_task >= step.tasks_per_node[step.node]:
            raise LaunchError(
                f"Slurm's variables contradict each other: task {step.local_task} of node {step.node}, in a step of "
                f"{environment.get('SLURM_STEP_TASKS_PER_NODE')} tasks on {environment.get('SLURM_STEP_NODELIST')}.",
                hint="heterogeneous jobs are not supported: start all tasks with one srun",
            )
        return step


def launcher_from_slurm(environment: Mapping[str, str], launch: LaunchConfig) -> LauncherProcess | None:
    """Return the launcher position of a task that `srun` started; None if Paceline must start the ranks itself.

    Launchers are numbered host by host, whatever `--distribution` Slurm uses. Raise `UsageError` if the hosts or ranks
    in the options differ from Slurm's. `--master` alone only sets the address of launcher 0. Together with `--hosts`
    it makes a manual launch, as on hosts without Slurm.
    """
    if "SLURM_JOB_ID" not in environment:
        return None
    if {"RANK", "WORLD_SIZE"} <= environment.keys():  # torchrun started this process.
        return None
    manual_launch = launch.master is not None and launch.hosts > 1
    step = None if manual_launch else SlurmStep.read(environment)
    if step is None:
        if not launch.master and not launch.emulate:
            _check_not_batch_script(environment)
        return None
    if step.tasks == 1 and (launch.emulate or launch.master or "SLURM_PTY_PORT" in environment):  # `srun --pty bash`
        return None
    reason = _find_conflict(step, launch)
    if reason is not None and step.node == step.local_task == 0:
        raise reason
    if reason is not None:
        raise SystemExit(reason.exit_code)  # Only the first task shows the error, since all print to one terminal.
    ranks_per_host = step.tasks_per_node[0]
    return LauncherProcess(
        number=step.node * ranks_per_host + step.local_task,
        launchers=step.tasks,
        ranks=1,
        master=launch.master or _master(step, environment),
        node=step.node,
        local_rank=step.local_task,
        local_size=ranks_per_host,
        started_by="slurm",
    )


def _find_conflict(step: SlurmStep, launch: LaunchConfig) -> UsageError | None:
    """Return the error, equal on all tasks, if the options do not fit the step; None if they fit."""
    if launch.emulate:
        return UsageError(
            f"--emulate {launch.emulate} was given, but Slurm started {step.tasks} tasks.",
            hint="one process starts all emulated hosts: use srun --ntasks=1",
        )
    if launch.node_rank:
        return UsageError(
            f"--node-rank {launch.node_rank} was given, but Slurm numbers its {step.tasks} tasks itself.",
            hint="remove --node-rank under srun, or give --hosts and --master as well to start hosts without Slurm",
        )
    if len(set(step.tasks_per_node)) > 1:
        found = ", ".join(map(str, step.tasks_per_node))
        most = max(step.tasks_per_node)
        return UsageError(
            f"Slurm started {found} tasks on {len(step.nodes)} nodes, but all hosts must have equally many ranks.",
            hint=f"run with --nodes={len(step.nodes)} --ntasks-per-node={most}",
        )
    return _find_size_mismatch(step, launch)


def _find_size_mismatch(step: SlurmStep, launch: LaunchConfig) -> UsageError | None:
    """Return the error if the number of hosts or ranks in the options differs from Slurm's; None if they are equal."""
    tasks, nodes = step.tasks, len(step.nodes)
    if launch.hosts not in (1, nodes):
        per_host = launch.local_ranks(default=max(1, tasks // nodes))
        return UsageError(
            f"{launch.hosts} hosts were requested, but this Slurm step has {nodes} (SLURM_NNODES={nodes}).",
            hint=f"start one task per rank: srun --nodes={launch.hosts} --ntasks-per-node={per_host}",
        )
    ranks = launch.ranks if launch.ranks is not None else nodes * (launch.ranks_per_host or tasks // nodes)
    if ranks == tasks:
        return None
    found = f"Slurm started {plural(tasks, 'task')} (SLURM_NTASKS={tasks})"
    found += "" if nodes == 1 else f" on {nodes} nodes"
    requested = f"{ranks} ranks" if launch.ranks is not None else f"{launch.ranks_per_host} ranks per node"
    if ranks % nodes:
        return UsageError(
            f"{requested} were requested, which cannot be divided evenly over the {nodes} nodes of this step.",
            hint=f"request a multiple of {nodes} ranks: every host must have the same number of ranks",
        )
    return UsageError(
        f"{requested} were requested, but {found}.",
        hint=f"start one task per rank: srun --nodes={nodes} --ntasks-per-node={ranks // nodes}",
    )


def _check_not_batch_script(environment: Mapping[str, str]) -> None:
    """Raise `UsageError` in a batch script whose job has several tasks; shells of an allocation are allowed."""
    if "SLURM_PROCID" not in environment or "SLURM_PTY_PORT" in environment:
        return
    # Not SLURM_TASKS_PER_NODE, which counts cores if the user did not set the number of tasks.
    name = "SLURM_NTASKS" if environment.get("SLURM_NTASKS") else "SLURM_JOB_NUM_NODES"
    tasks = _read_number(environment, name) if environment.get(name) else 1
    if tasks > 1:
        raise UsageError(
            f"paceline was started by the batch script, which runs once, but the job has {tasks} tasks.",
            hint="start one task per rank with `srun paceline …`; `paceline submit` writes such a script",
        )


def _read_number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    number = whole_number(text)
    if number is None:
        raise LaunchError(
            f"Slurm's variable {name} must be a number, but it is {text!r}.", hint="start the command with srun"
        )
    return number


def expand_tasks(text: str) -> list[int]:
    """Return the tasks of each node from Slurm's notation, for example 2(x3),1."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part, re.ASCII)
        times = int(found[2] or 1) if found else 0
        if found is None or len(counts) + times > MOST_NODES:
            raise LaunchError(
                f"SLURM_STEP_TASKS_PER_NODE is {text!r}, which is not a list of task counts such as 2(x3),1.",
                hint="start the command with srun",
            )
        counts += [int(found[1])] * times
    return counts


def expand_nodes(text: str) -> list[str]:
    """Return the names of nodes from Slurm's notation, for example n[1-3,07],gpu-a."""
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        segments = re.split(r"\[([^\]]*)\]", part) if _NODES.fullmatch(part) else []
        choices = [_expand_ranges(segment) if index % 2 else [segment] for index, segment in enumerate(segments)]
        if not segments or len(names) + math.prod(map(len, choices)) > MOST_NODES:
            raise LaunchError(
                f"SLURM_STEP_NODELIST is {text!r}, which is not a list of nodes such as n[1-3,07],gpu-a.",
                hint="start the command with srun",
            )
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    return names


def _expand_ranges(text: str) -> list[str]:
    """Return the numbers of ranges such as 1-3,07, padded with zeros to the width of each range's first number.

    Of ranges with too many numbers, return one too many.
    """
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found = range(int(first), int(last or first) + 1)[: MOST_NODES + 1]
        numbers += [f"{number:0{len(first)}d}" for number in found]
        if len(numbers) > MOST_NODES:
            break
    return numbers


def _master(step: SlurmStep, environment: Mapping[str, str]) -> str:
    address = _address_of_first_node(step, environment)
    return f"[{address}]:{step.port}" if ":" in address else f"{address}:{step.port}"


def _address_of_first_node(step: SlurmStep, environment: Mapping[str, str]) -> str:
    """Return an address at which other nodes reach the first node.

    This is the address of its name, otherwise the one in Slurm's configuration. Many hosts resolve their own name to
    127.0.1.1; the first node then uses its address on the route to the second node.
    """
    from paceline.comm.network import LOOPBACK, addresses_of_name, is_loopback, source_address

    if len(step.nodes) == 1:
        return LOOPBACK

    def reachable(name: str) -> list[str]:
        addresses = [address for address in addresses_of_name(name) if not is_loopback(address)]
        return sorted(addresses, key=lambda address: ":" in address)  # IPv4 first, so that all hosts choose the same.

    first = step.nodes[0]
    found = reachable(first)
    if found:
        return found[0]
    configured = _node_address(first, environment)
    if configured and re.fullmatch(r"[\d.]+|[\da-fA-F:]*:[\da-fA-F:.]*", configured):
        return configured  # Slurm reaches the node there. With a loopback address, all nodes are on this host.
    found = reachable(configured) if configured else []
    if not found and step.node == 0 and reachable(step.nodes[1]):
        found = [source_address(step.nodes[1])]
    if not found:
        resolved = ", ".join(addresses_of_name(first)) or "nothing"
        raise LaunchError(
            f"no address of {first}, the first node of this step, is known here: its name resolves to {resolved}.",
            hint=f"give an address of {first} that all nodes can reach: --master ADDRESS:{step.port}",
        )
    return found[0]


def _node_address(name: str, environment: Mapping[str, str]) -> str | None:
    """Return NodeAddr from Slurm's configuration: an address or, by default, the node's name; None if unknown."""
    output = scontrol("--oneliner", "show", "node", name, environment=environment)
    found = re.search(r"\bNodeAddr=(\S+)", output)
    return found[1] if found else None
