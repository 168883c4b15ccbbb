"""Under a real Slurm of two nodes: what `srun` says becomes seats, and jobs run. What it says is never made up here."""

from __future__ import annotations

import getpass
import json
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from launch.slurm.slurm_here import Slurm, missing_programs, slurm_here
from paceline.config import LaunchConfig
from paceline.errors import LaunchError, UsageError
from paceline.launch.launcher_process import LauncherProcess
from paceline.launch.slurm.step import FIRST_PORT, PORTS, SlurmStep, expand_nodes, expand_tasks, launcher_from_slurm
from paceline.records import read_run
from paceline.records.experiment import read_experiment

pytestmark = pytest.mark.takes(35)

KEEP = "import json, os; open('task-' + os.environ.get('SLURM_PROCID', '0'), 'w').write(json.dumps(dict(os.environ)))"
KEEP_ENVIRONMENT = shlex.join([sys.executable, "-c", KEEP])
TINY = ("cnn", "--data", "digits", "--steps", "12", "--batch", "64")
DONE = re.compile(r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT)")
LIMIT_S = 90
Environment = dict[str, str]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    missing = missing_programs()
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: Debian has them in slurm-wlm and munge")
    with slurm_here() as cluster:
        yield cluster


def environments(slurm: Slurm, *command: str) -> list[Environment]:
    """What the environment is where a command of Slurm starts a program, in the order of `SLURM_PROCID`."""
    for file in slurm.folder.glob("task-*"):
        file.unlink()
    done = slurm.call(*command)
    assert done.returncode == 0, done.stderr
    if "sbatch" in command:
        wait_for_job(slurm, int(done.stdout.split()[-1]))
    return [json.loads(file.read_text()) for file in sorted(slurm.folder.glob("task-*"))]


def tasks(slurm: Slurm, *command: str) -> list[Environment]:
    """Those of the tasks that `srun` or `salloc` start."""
    return environments(slurm, *command, "bash", "-c", KEEP_ENVIRONMENT)


def in_batch_script(slurm: Slurm, *options: str, before: Sequence[str] = ()) -> Environment:
    """That of a batch script."""
    (environment,) = environments(slurm, *before, "sbatch", *options, f"--wrap={KEEP_ENVIRONMENT}")
    return environment


def wait_for_job(slurm: Slurm, job: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not DONE.search(shown := slurm.run("scontrol", "show", "job", str(job))):
        assert time.monotonic() < deadline, shown
        time.sleep(0.1)


def launcher(environment: Environment, **launch: object) -> LauncherProcess | None:
    return launcher_from_slurm(environment, LaunchConfig(**launch))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def four_tasks(slurm: Slurm) -> list[Environment]:
    """Two tasks on each of two nodes."""
    return tasks(slurm, "srun", "--nodes=2", "--ntasks-per-node=2")


@pytest.fixture(scope="module")
def one_task(slurm: Slurm) -> Environment:
    (environment,) = tasks(slurm, "srun", "--ntasks=1")
    return environment


def test_a_task_is_a_seat(four_tasks: list[Environment]) -> None:
    launchers = [launcher(environment) for environment in four_tasks]
    job = int(four_tasks[0]["SLURM_JOB_ID"])
    assert launchers == [
        LauncherProcess(
            number=number,
            launchers=4,
            ranks=1,
            master=f"127.0.0.1:{FIRST_PORT + job * 64 % PORTS}",
            node=number // 2,
            local_rank=number % 2,
            local_size=2,
            started_by="slurm",
        )
        for number in range(4)
    ]


def test_what_is_asked_for_may_be_what_slurm_gives(four_tasks: list[Environment]) -> None:
    assert launcher(four_tasks[3], ranks=4) == launcher(four_tasks[3], ranks_per_host=2) == launcher(four_tasks[3])


@pytest.mark.parametrize(
    ("order", "hosts"),
    [("cyclic", "n1\nn1\nn2\nn2\n"), ("arbitrary", "n2\nn2\nn1\nn1\n"), ("arbitrary", "n2\nn1\nn2\nn1\n")],
)
def test_seats_of_a_host_stand_together_however_tasks_are_dealt_out(slurm: Slurm, order: str, hosts: str) -> None:
    file = slurm.folder / "hosts"
    file.write_text(hosts)
    which = {"arbitrary": ["env", f"SLURM_HOSTFILE={file}"]}.get(order, [])
    spread = ["--nodes=2", "--ntasks-per-node=2"] if order == "cyclic" else ["--ntasks=4"]
    started = tasks(slurm, *which, "srun", f"--distribution={order}", *spread)
    assert [task["SLURMD_NODENAME"] for task in started] != ["n1", "n1", "n2", "n2"]
    launchers = {found.number: (task["SLURMD_NODENAME"], found) for task in started if (found := launcher(task))}
    # Seat 0 is on the node where all others look for it.
    assert [launchers[number][0] for number in range(4)] == ["n1", "n1", "n2", "n2"]
    assert [launchers[number][1].local_rank for number in range(4)] == [0, 1, 0, 1]


def test_uneven_tasks_are_refused(slurm: Slurm) -> None:
    first, *others = tasks(slurm, "srun", "--nodes=2", "--ntasks=3")
    assert "gave its 2 nodes 2, 1 tasks, but a run needs as many ranks on every host" in refusal(first, others).message


def refusal(first: Environment, others: Sequence[Environment], **asked: object) -> UsageError:
    """Why a step is refused: one task says it, all of them leave."""
    for environment in others:
        with pytest.raises(SystemExit) as left:
            launcher(environment, **asked)
        assert left.value.code == UsageError.exit_code
    with pytest.raises(UsageError) as refused:
        launcher(first, **asked)
    assert refused.value.hint
    return refused.value


@pytest.mark.parametrize(
    ("asked", "found", "fix"),
    [
        (
            {"ranks_per_host": 2},
            "SLURM_NTASKS=1 but 2 ranks per node asked: run with --ntasks=2.",
            "srun --nodes=1 --ntasks-per-node=2",
        ),
        ({"ranks": 3}, "SLURM_NTASKS=1 but 3 ranks asked: run with --ntasks=3.", "--ntasks-per-node=3"),
    ],
)
def test_one_task_is_one_rank(one_task: Environment, asked: dict[str, int], found: str, fix: str) -> None:
    refused = refusal(one_task, [], **asked)
    assert refused.message == found
    assert fix in (refused.hint or "")
    alone = launcher(one_task)
    assert alone is not None
    assert (alone.launchers, alone.ranks, (alone.master or "").partition(":")[0]) == (1, 1, "127.0.0.1")


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"ranks_per_host": 4}, "SLURM_NTASKS=4 on 2 nodes but 4 ranks per node asked: run with --ntasks=8."),
        ({"ranks": 2}, "SLURM_NTASKS=4 on 2 nodes but 2 ranks asked: run with --ntasks=2."),
        ({"ranks": 3}, "SLURM_NTASKS=4 on 2 nodes but 3 ranks asked, which do not divide over 2 nodes."),
        ({"hosts": 3}, "SLURM_NNODES=2 but 3 hosts asked: run with --nodes=3."),
        ({"hosts": 2, "node_rank": 1}, "--node-rank 1 was given, but Slurm has numbered its 4 tasks."),
        ({"emulate": "2"}, "--emulate 2 was given, but Slurm started 4 tasks."),
    ],
)
def test_what_slurm_does_not_give_is_refused(
    four_tasks: list[Environment], asked: dict[str, object], found: str
) -> None:
    assert refusal(four_tasks[0], four_tasks[1:], **asked).message == found


def test_the_users_own_words_win(four_tasks: list[Environment], one_task: Environment) -> None:
    """Who names the hosts and their master does without Slurm's; the master alone is where the tasks meet."""
    assert launcher(four_tasks[2], hosts=2, node_rank=1, master="198.18.0.1:29500") is None
    told = launcher(four_tasks[2], master="198.18.0.1:29500")
    assert told is not None
    assert (told.master, told.number, told.launchers) == ("198.18.0.1:29500", 2, 4)
    assert launcher(one_task, emulate="2@1gbit") is None
    assert launcher(one_task, master="198.18.0.1:29500") is None


def test_a_batch_script_is_no_rank(slurm: Slurm) -> None:
    with pytest.raises(UsageError, match=r"this is the batch script itself.*4 tasks: start it with srun paceline") as e:
        launcher(in_batch_script(slurm, "--nodes=2", "--ntasks-per-node=2"))
    assert "paceline submit" in (e.value.hint or "")


def test_a_batch_script_of_one_task_starts_ranks_as_any_host(slurm: Slurm) -> None:
    environment = in_batch_script(slurm, "--exclusive")
    assert environment["SLURM_TASKS_PER_NODE"] == "8"  # Cores, since nobody has spoken of tasks.
    assert launcher(environment) is None
    assert launcher(environment, ranks=2) is None


def test_a_shell_of_an_allocation_is_no_rank(slurm: Slurm) -> None:
    (environment,) = tasks(slurm, "salloc", "--nodes=2", "--ntasks=4")
    assert environment["SLURM_NTASKS"] == "4"
    assert launcher(environment) is None


def test_an_interactive_step_is_a_shell(slurm: Slurm, one_task: Environment) -> None:
    command = "srun --ntasks=1 --pty bash -c 'env -0 > shell.env'"
    slurm.call("script", "-qec", command, "/dev/null")
    text = (slurm.folder / "shell.env").read_text()
    shell = dict(line.split("=", 1) for line in text.split("\0") if line)
    assert shell.keys() >= one_task.keys() & {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"}
    assert launcher(shell, ranks=2) is None


def test_the_variables_of_a_step_do_not_reach_into_jobs_submitted_from_it(slurm: Slurm, one_task: Environment) -> None:
    left = [f"{name}={value}" for name, value in one_task.items() if name.startswith("SLURM_STEP")]
    environment = in_batch_script(slurm, "--nodes=2", "--ntasks=2", before=["env", *left])
    assert environment["SLURM_STEP_ID"] == one_task["SLURM_STEP_ID"]
    with pytest.raises(UsageError, match="this is the batch script itself"):
        launcher(environment)


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_JOB_NUM_NODES"])
def test_what_slurm_would_never_say_is_told_by_name(name: str) -> None:
    with pytest.raises(LaunchError, match=f"{name} to a number, but it is 'x'"):
        launcher({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", name: "x"})


def test_outside_of_slurm_and_under_torchrun_there_is_no_seat(four_tasks: list[Environment]) -> None:
    assert launcher({}) is None
    assert launcher(four_tasks[0] | {"RANK": "0", "WORLD_SIZE": "4"}) is None


def test_steps_meet_at_ports_of_their_own(one_task: Environment) -> None:
    steps = [SlurmStep.read(one_task | {"SLURM_STEP_ID": str(number)}) for number in (*range(200), 4294967290)]
    ports = [step.port for step in steps if step is not None]
    assert len(set(ports)) == 201
    assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in ports)
    other = SlurmStep.read(one_task | {"SLURM_JOB_ID": str(int(one_task["SLURM_JOB_ID"]) + 1)})
    assert other is not None
    assert other.port not in ports[:64]


NODE_LISTS = ["n1", "n[1-3,07],gpu-a", "rack[01-02]node[9-11]", "a[08-11],b", "n[0-1]", "x-1,x-[2,4]"]


@pytest.mark.parametrize("text", NODE_LISTS)
def test_nodes_are_named_as_slurm_does(slurm: Slurm, text: str) -> None:
    assert expand_nodes(text) == slurm.run("scontrol", "show", "hostnames", text).split()


@pytest.mark.parametrize("text", ["", "n[1-2", "n1,,n2", "n[a-b]", "n1 n2", "n[]"])
def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="is not a list of nodes"):
        expand_nodes(text)


def test_tasks_of_nodes() -> None:
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks("4") == [4]
    for text in ("", "2(x", "two", "1,,1"):
        with pytest.raises(LaunchError, match="is not a number of tasks"):
            expand_tasks(text)


def test_variables_that_contradict_each_other_are_refused(four_tasks: list[Environment]) -> None:
    for change in ({"SLURM_NODEID": "2"}, {"SLURM_LOCALID": "2"}, {"SLURM_STEP_NODELIST": "n1"}):
        with pytest.raises(LaunchError, match="contradict each other"):
            launcher(four_tasks[0] | change)
    with pytest.raises(LaunchError, match="should have set SLURM_NODEID to a number, but it is ''"):
        launcher({name: value for name, value in four_tasks[0].items() if name != "SLURM_NODEID"})


class Names:
    """A resolver and a `scontrol` that say what they are told to; a step of two nodes, seen from either."""

    def __init__(self, folder: Path, step: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.step, self.resolved = folder, step, {"n2": ["198.51.100.2"]}
        monkeypatch.setattr("paceline.comm.network.addresses_of_name", lambda name: self.resolved.get(name, []))
        monkeypatch.setattr("paceline.comm.network.source_address", {"n2": "198.51.100.1"}.__getitem__)

    def master(self, node: int, node_address: str | None = None) -> str:
        """The master's address on a node, where Slurm has that address for the first of them."""
        program = self.folder / "scontrol"
        program.write_text(f"#!/bin/sh\necho NodeName=n1 NodeAddr={node_address or '$5'} NodeHostName=n1\n")
        program.chmod(0o755)
        found = launcher(self.step | {"SLURM_NODEID": str(node), "PATH": f"{self.folder}:/usr/bin:/bin"})
        assert found is not None
        return (found.master or "").rpartition(":")[0]


@pytest.fixture
def names(tmp_path: Path, four_tasks: list[Environment], monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(tmp_path, four_tasks[0], monkeypatch)


def test_a_name_that_all_know_is_the_masters(names: Names) -> None:
    names.resolved["n1"] = ["2001:db8::1", "198.51.100.1"]
    assert names.master(0) == names.master(1) == "198.51.100.1"
    names.resolved["n1"] = ["2001:db8::1"]
    assert names.master(1) == "[2001:db8::1]"


@pytest.mark.parametrize("resolved", [[], ["127.0.1.1"], ["127.0.1.1", "::1"]])
def test_a_name_that_leads_nowhere_or_to_oneself_is_slurms_to_say(names: Names, resolved: list[str]) -> None:
    names.resolved["n1"] = resolved
    assert names.master(0, "198.51.100.9") == names.master(1, "198.51.100.9") == "198.51.100.9"
    names.resolved["n1-net"] = ["198.51.100.8"]
    assert names.master(0, "n1-net") == names.master(1, "n1-net") == "198.51.100.8"


def test_the_first_node_knows_itself_by_the_route_to_the_second(names: Names) -> None:
    """A hostile /etc/hosts: its own name is 127.0.1.1 there, and Slurm knows it by that name only."""
    names.resolved["n1"] = ["127.0.1.1"]
    assert names.master(0) == "198.51.100.1"
    with pytest.raises(LaunchError, match=r"n1, the first node of this step, is not known here.* to 127\.0\.1\.1") as e:
        names.master(1)
    assert "--master ADDRESS:" in (e.value.hint or "")


def test_a_mismatch_ends_a_command_before_anything_starts(slurm: Slurm, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline", "train", *TINY, "--ranks-per-host", "2"]
    done = slurm.call("srun", "--ntasks=1", *command, cwd=tmp_path)
    assert done.returncode == 2
    assert "error: SLURM_NTASKS=1 but 2 ranks per node asked: run with --ntasks=2.\nhint: " in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.soak  # The suite has a comparison over two nodes.
def test_train_over_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline", "train", *TINY, "--out", "record"]
    done = slurm.call("srun", "--nodes=2", "--ntasks-per-node=1", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("record: ") == 1
    record = read_run(tmp_path / "record")
    assert (record.topology["world_size"], record.topology["ranks_per_host"]) == (2, 1)
    assert sorted(record.steps) == [0, 1]


ODD = 'it\'s "quoted" \\ #1 $HOME %j'


def test_a_submitted_comparison_leaves_its_records_where_it_said(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "a b'c"
    folder.mkdir()
    own = ["--slurm", "--hosts", "2", "--ranks-per-host", "1", "--time", "5", f"--comment={ODD}", "--json"]
    own += ["--output", "%x-%u-%6j.100%%"]
    once = ["--repeats", "1", "--max-repeats", "1", "--no-proof", "--no-doctor", "--strategies", "allreduce,ddp"]
    command = [sys.executable, "-m", "paceline", "submit", *own, "--", "compare", *TINY, *once]
    done = slurm.call(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    shown = slurm.run("scontrol", "show", "job", str(told["job"]))
    assert f"Comment={ODD}" in shown
    assert told["log"] == f"{folder}/paceline-compare-{getpass.getuser()}-{told['job']:06d}.100%"
    assert "NumNodes=2" in shown
    wait_for_job(slurm, told["job"])
    said = Path(told["log"]).read_text()
    experiment = read_experiment(Path(told["records"]))
    assert [candidate.name for candidate in experiment.candidates] == ["allreduce", "ddp"], said
    report = slurm.call(sys.executable, "-m", "paceline", "report", told["records"], "--json")
    assert report.returncode == 0, report.stderr
    assert all(row["step_s"] for row in json.loads(report.stdout)["rows"]), said


def test_a_mistake_is_told_once_on_each_host(slurm: Slurm) -> None:
    done = slurm.call("srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "-m", "paceline", "train", "nosuch")
    assert done.returncode == UsageError.exit_code
    assert done.stderr.count("there is no workload 'nosuch'") == 2


def test_sbatchs_own_words_are_shown(slurm: Slurm, tmp_path: Path) -> None:
    own = ["submit", "--slurm", "--partition", "gone", "--", "train", *TINY]
    done = slurm.call(sys.executable, "-m", "paceline", *own, cwd=tmp_path)
    assert done.returncode == 5
    assert "#SBATCH --partition=gone\n" in done.stdout
    assert "invalid partition specified: gone" in done.stderr
    assert "error: sbatch did not take the job.\n" in done.stderr
    assert not list(tmp_path.iterdir())
