"""The seat that Slurm gives to a process: every task of a step is a rank. Free of torch.

`srun` tells each task where it sits (`SLURM_STEP_…`, `SLURM_NODEID`, `SLURM_LOCALID`). A batch script and the shells of
an allocation know of Slurm too, but are no tasks of a step: ranks are then started as on any one host.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config import LaunchConfig
from paceline.errors import LaunchError, UsageError
from paceline.launch.launcher_process import LauncherProcess

FIRST_PORT = 12288
PORTS = 16384
"""Seat 0 listens on a port from 12288 to 28671: below those that systems give out, and away from Slurm's own."""
STEPS = 64
"""Ports between two jobs: their first steps do not meet at one port, and no two steps of a job ever do."""
SCONTROL_S = 20.0


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """What `srun` started, and which of its tasks we are."""

    job: int
    number: int
    nodes: tuple[str, ...]
    tasks_of_nodes: tuple[int, ...]
    node: int
    local_task: int

    @property
    def tasks(self) -> int:
        """Tasks on all nodes."""
        return sum(self.tasks_of_nodes)

    @property
    def port(self) -> int:
        """Where its tasks meet."""
        return FIRST_PORT + (self.job * STEPS + self.number) % PORTS

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> SlurmStep | None:
        """The step this process is a task of; None where it is none.

        The variables of a step stay in the environment of whatever its tasks start, job scripts that are submitted
        from a shell included. Only in the step itself its tasks are `SLURM_NTASKS` too.
        """
        text = environment.get("SLURM_STEP_NUM_TASKS")
        if text is None or text != environment.get("SLURM_NTASKS"):
            return None
        step = cls(
            job=_number(environment, "SLURM_JOB_ID"),
            number=_number(environment, "SLURM_STEP_ID"),
            nodes=tuple(expand_nodes(environment.get("SLURM_STEP_NODELIST", ""))),
            tasks_of_nodes=tuple(expand_tasks(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))),
            node=_number(environment, "SLURM_NODEID"),
            local_task=_number(environment, "SLURM_LOCALID"),
        )
        nodes = len(step.tasks_of_nodes)
        if len(step.nodes) != nodes or step.node >= nodes or step.local_task >= step.tasks_of_nodes[step.node]:
            raise LaunchError(
                f"Slurm's variables contradict each other: task {step.local_task} of node {step.node}, in a step of "
                f"{environment.get('SLURM_STEP_TASKS_PER_NODE')} tasks on {environment.get('SLURM_STEP_NODELIST')}.",
                hint="a job of several components cannot be one launch: start it with one srun",
            )
        return step


def launcher_from_slurm(environment: Mapping[str, str], launch: LaunchConfig) -> LauncherProcess | None:
    """The seat of a task that `srun` started; None where Slurm starts no ranks, and we do.

    Seats are counted host by host, however `--distribution` deals tasks out. What the user says of hosts and ranks has
    to be what Slurm gives. `--master` alone only says where the tasks meet; with `--hosts` it is a launch of the
    user's own, as on hosts without Slurm.
    """
    if "SLURM_JOB_ID" not in environment or {"RANK", "WORLD_SIZE"} <= environment.keys():  # Those are torchrun's.
        return None
    own_launch = launch.master is not None and launch.hosts > 1
    step = None if own_launch else SlurmStep.read(environment)
    if step is None:
        if not launch.master and not launch.emulate:
            _refuse_batch_script(environment)
        return None
    if step.tasks == 1 and (launch.emulate or launch.master or "SLURM_PTY_PORT" in environment):  # `srun --pty bash`
        return None
    reason = _misfit(step, launch)
    if reason is not None and step.node == step.local_task == 0:
        raise reason
    if reason is not None:
        raise SystemExit(reason.exit_code)  # On one terminal once is enough.
    ranks_per_host = step.tasks_of_nodes[0]
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


def _misfit(step: SlurmStep, launch: LaunchConfig) -> UsageError | None:
    """Why the step cannot be the launch that is asked for, the same on all tasks; None where it can."""
    if launch.emulate:
        return UsageError(
            f"--emulate {launch.emulate} was given, but Slurm started {step.tasks} tasks.",
            hint="emulated hosts are started by one process: srun --ntasks=1",
        )
    if launch.node_rank:
        return UsageError(
            f"--node-rank {launch.node_rank} was given, but Slurm has numbered its {step.tasks} tasks.",
            hint="leave it out under srun; with --hosts and --master it is a launch without Slurm's help",
        )
    if len(set(step.tasks_of_nodes)) > 1:
        found = ", ".join(map(str, step.tasks_of_nodes))
        most = max(step.tasks_of_nodes)
        return UsageError(
            f"Slurm gave its {len(step.nodes)} nodes {found} tasks, but a run needs as many ranks on every host.",
            hint=f"run with --nodes={len(step.nodes)} --ntasks-per-node={most}",
        )
    return _mismatch(step, launch)


def _mismatch(step: SlurmStep, launch: LaunchConfig) -> UsageError | None:
    """What the user asked for beside what Slurm gives, and how to ask Slurm for it; None where they are the same."""
    tasks, nodes = step.tasks, len(step.nodes)
    if launch.hosts not in (1, nodes):
        per_host = launch.local_ranks(default=max(1, tasks // nodes))
        return UsageError(
            f"SLURM_NNODES={nodes} but {launch.hosts} hosts asked: run with --nodes={launch.hosts}.",
            hint=f"srun starts a task per rank: srun --nodes={launch.hosts} --ntasks-per-node={per_host}",
        )
    ranks = launch.ranks if launch.ranks is not None else nodes * (launch.ranks_per_host or tasks // nodes)
    if ranks == tasks:
        return None
    where = "" if nodes == 1 else f" on {nodes} nodes"
    asked = f"{ranks} ranks" if launch.ranks is not None else f"{launch.ranks_per_host} ranks per node"
    if ranks % nodes:
        return UsageError(
            f"SLURM_NTASKS={tasks}{where} but {asked} asked, which do not divide over {nodes} nodes.",
            hint="a run needs as many ranks on every host",
        )
    return UsageError(
        f"SLURM_NTASKS={tasks}{where} but {asked} asked: run with --ntasks={ranks}.",
        hint=f"srun starts a task per rank: srun --nodes={nodes} --ntasks-per-node={ranks // nodes}",
    )


def _refuse_batch_script(environment: Mapping[str, str]) -> None:
    """Refuses to run once where the job has a task for each of several ranks. An allocation's shells are left alone."""
    if "SLURM_PROCID" not in environment or "SLURM_PTY_PORT" in environment:
        return
    # SLURM_TASKS_PER_NODE counts cores where the user has not said how many tasks.
    name = "SLURM_NTASKS" if environment.get("SLURM_NTASKS") else "SLURM_JOB_NUM_NODES"
    tasks = _number(environment, name) if environment.get(name) else 1
    if tasks > 1:
        raise UsageError(
            f"this is the batch script itself, which runs once, but the job has {tasks} tasks: "
            "start it with srun paceline ….",
            hint="srun starts a task per rank; `paceline submit` writes such a script",
        )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise LaunchError(f"Slurm should have set {name} to a number, but it is {text!r}.", hint="start it with srun")
    return int(text)


def expand_tasks(text: str) -> list[int]:
    """Tasks of each node, from a text as 2(x3),1."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise LaunchError(f"{text!r} is not a number of tasks for each node, as Slurm writes it: 2(x3),1.")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def expand_nodes(text: str) -> list[str]:
    """The names of nodes, from a list as n[1-3,07],gpu-a."""
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        if not re.fullmatch(r"(?:[^\[\],\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+", part):
            raise LaunchError(f"{text!r} is not a list of nodes, as Slurm writes it: n[1-3,07],gpu-a.")
        pieces = re.split(r"\[([^\]]*)\]", part)
        choices = [_expand_ranges(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    return names


def _expand_ranges(text: str) -> list[str]:
    """The numbers of 1-3,07, as wide as the first of each range is written."""
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return numbers


def _master(step: SlurmStep, environment: Mapping[str, str]) -> str:
    address = _address_of_first_node(step, environment)
    return f"[{address}]:{step.port}" if ":" in address else f"{address}:{step.port}"


def _address_of_first_node(step: SlurmStep, environment: Mapping[str, str]) -> str:
    """Where the other nodes reach the first one: the address of its name, else the one that Slurm itself uses.

    Many hosts resolve their own name to 127.0.1.1. The first node then takes the address that it has on the route to
    the second.
    """
    from paceline.comm.network import LOOPBACK, addresses_of_name, is_loopback, source_address

    if len(step.nodes) == 1:
        return LOOPBACK

    def reachable(name: str) -> list[str]:
        addresses = [address for address in addresses_of_name(name) if not is_loopback(address)]
        return sorted(addresses, key=lambda address: ":" in address)  # IPv4 first, on every host alike.

    first = step.nodes[0]
    found = reachable(first)
    if found:
        return found[0]
    configured = _node_address(first, environment)
    if configured and re.fullmatch(r"[\d.]+|[\da-fA-F:]*:[\da-fA-F:.]*", configured):
        return configured  # As all of Slurm reaches it. A loopback one means that all nodes are on this host.
    found = reachable(configured) if configured else []
    if not found and step.node == 0 and reachable(step.nodes[1]):
        found = [source_address(step.nodes[1])]
    if not found:
        resolved = ", ".join(addresses_of_name(first)) or "nothing"
        raise LaunchError(
            f"the address of {first}, the first node of this step, is not known here: it resolves to {resolved}.",
            hint=f"say where the tasks meet: --master ADDRESS:{step.port}, with an address of {first}",
        )
    return found[0]


def _node_address(name: str, environment: Mapping[str, str]) -> str | None:
    """NodeAddr of Slurm's configuration: an address, or a name, the node's own as a rule."""
    try:
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", name],
            capture_output=True,
            text=True,
            timeout=SCONTROL_S,
            check=False,
            env=dict(environment),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return found[1] if found else None
