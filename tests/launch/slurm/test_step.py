"""Launcher positions and jobs in a real Slurm of two nodes; the environments come from Slurm, not from the tests."""

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

from commands import USER_CODE, wait_until
from launch.slurm.slurm_here import Slurm, missing_programs, running_slurm
from paceline.config import LaunchConfig
from paceline.errors import LaunchError, UsageError
from paceline.launch.faults.restarts import last_step
from paceline.launch.launcher_process import LauncherProcess
from paceline.launch.slurm.step import (
    FIRST_PORT,
    PORT_COUNT,
    SlurmStep,
    expand_nodes,
    expand_tasks,
    launcher_from_slurm,
)
from paceline.records import read_run
from paceline.records.events import ResumedEvent
from paceline.records.experiment.record import read_experiment

pytestmark = pytest.mark.takes(50)

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
        pytest.skip(f"{', '.join(missing)} not installed: on Debian, install slurm-wlm and munge")
    with running_slurm() as cluster:
        yield cluster


def environments(slurm: Slurm, *command: str) -> list[Environment]:
    """Run a Slurm command; return the environments of the programs it starts, in the order of `SLURM_PROCID`."""
    for file in slurm.folder.glob("task-*"):
        file.unlink()
    done = slurm.call(*command)
    assert done.returncode == 0, done.stderr
    if "sbatch" in command:
        wait_for_job(slurm, int(done.stdout.split()[-1]))
    return [json.loads(file.read_text()) for file in sorted(slurm.folder.glob("task-*"))]


def tasks(slurm: Slurm, *command: str) -> list[Environment]:
    """Return the environments of the tasks that `srun` or `salloc` starts."""
    return environments(slurm, *command, "bash", "-c", KEEP_ENVIRONMENT)


def in_batch_script(slurm: Slurm, *options: str, before: Sequence[str] = ()) -> Environment:
    """Return the environment of a batch script."""
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


def test_each_task_is_a_launcher_of_one_rank(four_tasks: list[Environment]) -> None:
    launchers = [launcher(environment) for environment in four_tasks]
    job = int(four_tasks[0]["SLURM_JOB_ID"])
    assert launchers == [
        LauncherProcess(
            number=number,
            launchers=4,
            ranks=1,
            master=f"127.0.0.1:{FIRST_PORT + job * 64 % PORT_COUNT}",
            node=number // 2,
            local_rank=number % 2,
            local_size=2,
            started_by="slurm",
        )
        for number in range(4)
    ]


def test_options_equal_to_slurms_are_accepted(four_tasks: list[Environment]) -> None:
    assert launcher(four_tasks[3], ranks=4) == launcher(four_tasks[3], ranks_per_host=2) == launcher(four_tasks[3])


@pytest.mark.parametrize(
    ("order", "hosts"),
    [("cyclic", "n1\nn1\nn2\nn2\n"), ("arbitrary", "n2\nn2\nn1\nn1\n"), ("arbitrary", "n2\nn1\nn2\nn1\n")],
)
def test_launchers_of_a_host_are_consecutive_with_any_distribution(slurm: Slurm, order: str, hosts: str) -> None:
    file = slurm.folder / "hosts"
    file.write_text(hosts)
    which = {"arbitrary": ["env", f"SLURM_HOSTFILE={file}"]}.get(order, [])
    spread = ["--nodes=2", "--ntasks-per-node=2"] if order == "cyclic" else ["--ntasks=4"]
    started = tasks(slurm, *which, "srun", f"--distribution={order}", *spread)
    assert [task["SLURMD_NODENAME"] for task in started] != ["n1", "n1", "n2", "n2"]
    launchers = {found.number: (task["SLURMD_NODENAME"], found) for task in started if (found := launcher(task))}
    # Launcher 0 is on the node that the others connect to.
    assert [launchers[number][0] for number in range(4)] == ["n1", "n1", "n2", "n2"]
    assert [launchers[number][1].local_rank for number in range(4)] == [0, 1, 0, 1]


def test_uneven_tasks_are_refused(slurm: Slurm) -> None:
    first, *others = tasks(slurm, "srun", "--nodes=2", "--ntasks=3")
    assert (
        "Slurm started 2, 1 tasks on 2 nodes, but all hosts must have equally many ranks"
        in refusal(first, others).message
    )


def refusal(first: Environment, others: Sequence[Environment], **options: object) -> UsageError:
    """Return the error that refuses a step: the first task raises it, and the others exit with its code."""
    for environment in others:
        with pytest.raises(SystemExit) as left:
            launcher(environment, **options)
        assert left.value.code == UsageError.exit_code
    with pytest.raises(UsageError) as refused:
        launcher(first, **options)
    assert refused.value.hint
    return refused.value


@pytest.mark.parametrize(
    ("options", "found", "fix"),
    [
        (
            {"ranks_per_host": 2},
            "2 ranks per node were requested, but Slurm started 1 task (SLURM_NTASKS=1).",
            "srun --nodes=1 --ntasks-per-node=2",
        ),
        ({"ranks": 3}, "3 ranks were requested, but Slurm started 1 task (SLURM_NTASKS=1).", "--ntasks-per-node=3"),
    ],
)
def test_one_task_is_one_rank(one_task: Environment, options: dict[str, int], found: str, fix: str) -> None:
    refused = refusal(one_task, [], **options)
    assert refused.message == found
    assert fix in (refused.hint or "")
    alone = launcher(one_task)
    assert alone is not None
    assert (alone.launchers, alone.ranks, (alone.master or "").partition(":")[0]) == (1, 1, "127.0.0.1")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (
            {"ranks_per_host": 4},
            "4 ranks per node were requested, but Slurm started 4 tasks (SLURM_NTASKS=4) on 2 nodes.",
        ),
        ({"ranks": 2}, "2 ranks were requested, but Slurm started 4 tasks (SLURM_NTASKS=4) on 2 nodes."),
        (
            {"ranks": 3},
            "3 ranks were requested, which cannot be divided evenly over the 2 nodes of this step.",
        ),
        ({"hosts": 3}, "3 hosts were requested, but this Slurm step has 2 (SLURM_NNODES=2)."),
        ({"hosts": 2, "node_rank": 1}, "--node-rank 1 was given, but Slurm numbers its 4 tasks itself."),
        ({"emulate": "2"}, "--emulate 2 was given, but Slurm started 4 tasks."),
    ],
)
def test_options_that_differ_from_slurms_are_refused(
    four_tasks: list[Environment], options: dict[str, object], found: str
) -> None:
    assert refusal(four_tasks[0], four_tasks[1:], **options).message == found


def test_a_manual_launch_overrides_slurm(four_tasks: list[Environment], one_task: Environment) -> None:
    """`--hosts` with `--master` makes a manual launch; `--master` alone only sets the address of launcher 0."""
    assert launcher(four_tasks[2], hosts=2, node_rank=1, master="198.18.0.1:29500") is None
    found = launcher(four_tasks[2], master="198.18.0.1:29500")
    assert found is not None
    assert (found.master, found.number, found.launchers) == ("198.18.0.1:29500", 2, 4)
    assert launcher(one_task, emulate="2@1gbit") is None
    assert launcher(one_task, master="198.18.0.1:29500") is None


def test_a_batch_script_with_several_tasks_is_refused(slurm: Slurm) -> None:
    with pytest.raises(UsageError, match=r"started by the batch script, which runs once.*4 tasks") as e:
        launcher(in_batch_script(slurm, "--nodes=2", "--ntasks-per-node=2"))
    assert "srun paceline" in (e.value.hint or "")
    assert "paceline submit" in (e.value.hint or "")


def test_a_batch_script_with_one_task_starts_ranks_itself(slurm: Slurm) -> None:
    environment = in_batch_script(slurm, "--exclusive")
    assert environment["SLURM_TASKS_PER_NODE"] == "8"  # Cores, since the number of tasks was not set.
    assert launcher(environment) is None
    assert launcher(environment, ranks=2) is None


def test_a_shell_of_an_allocation_is_not_a_task(slurm: Slurm) -> None:
    (environment,) = tasks(slurm, "salloc", "--nodes=2", "--ntasks=4")
    assert environment["SLURM_NTASKS"] == "4"
    assert launcher(environment) is None


def test_an_interactive_step_is_not_a_task(slurm: Slurm, one_task: Environment) -> None:
    command = "srun --ntasks=1 --pty bash -c 'env -0 > shell.env'"
    slurm.call("script", "-qec", command, "/dev/null")
    text = (slurm.folder / "shell.env").read_text()
    shell = dict(line.split("=", 1) for line in text.split("\0") if line)
    assert shell.keys() >= one_task.keys() & {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"}
    assert launcher(shell, ranks=2) is None


def test_variables_of_a_step_are_ignored_in_jobs_submitted_from_it(slurm: Slurm, one_task: Environment) -> None:
    left = [f"{name}={value}" for name, value in one_task.items() if name.startswith("SLURM_STEP")]
    environment = in_batch_script(slurm, "--nodes=2", "--ntasks=2", before=["env", *left])
    assert environment["SLURM_STEP_ID"] == one_task["SLURM_STEP_ID"]
    with pytest.raises(UsageError, match="started by the batch script"):
        launcher(environment)


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_JOB_NUM_NODES"])
def test_invalid_slurm_variables_are_named(name: str) -> None:
    with pytest.raises(LaunchError, match=f"{name} must be a number, but it is 'x'"):
        launcher({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", name: "x"})


def test_outside_of_slurm_and_under_torchrun_there_is_no_step(four_tasks: list[Environment]) -> None:
    assert launcher({}) is None
    assert launcher(four_tasks[0] | {"RANK": "0", "WORLD_SIZE": "4"}) is None


def test_steps_use_different_ports(one_task: Environment) -> None:
    steps = [SlurmStep.read(one_task | {"SLURM_STEP_ID": str(number)}) for number in (*range(200), 4294967290)]
    ports = [step.port for step in steps if step is not None]
    assert len(set(ports)) == 201
    assert all(FIRST_PORT <= port < FIRST_PORT + PORT_COUNT for port in ports)
    other = SlurmStep.read(one_task | {"SLURM_JOB_ID": str(int(one_task["SLURM_JOB_ID"]) + 1)})
    assert other is not None
    assert other.port not in ports[:64]


NODE_LISTS = ["n1", "n[1-3,07],gpu-a", "rack[01-02]node[9-11]", "a[08-11],b", "n[0-1]", "x-1,x-[2,4]"]


@pytest.mark.parametrize("text", NODE_LISTS)
def test_node_lists_expand_as_in_slurm(slurm: Slurm, text: str) -> None:
    assert expand_nodes(text) == slurm.run("scontrol", "show", "hostnames", text).split()


@pytest.mark.parametrize("text", ["", "n[1-2", "n1,,n2", "n[a-b]", "n1 n2", "n[]", "n[1-999999999]", "n[1-999][1-999]"])
def test_invalid_node_lists_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="is not a list of nodes"):
        expand_nodes(text)


def test_task_counts_expand() -> None:
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks("4") == [4]
    for text in ("", "2(x", "two", "1,,1", "1(x999999999)", "9" * 5_000):
        with pytest.raises(LaunchError, match="is not a list of task counts"):
            expand_tasks(text)


def test_variables_that_contradict_each_other_are_refused(four_tasks: list[Environment]) -> None:
    for change in ({"SLURM_NODEID": "2"}, {"SLURM_LOCALID": "2"}, {"SLURM_STEP_NODELIST": "n1"}):
        with pytest.raises(LaunchError, match="contradict each other"):
            launcher(four_tasks[0] | change)
    with pytest.raises(LaunchError, match="SLURM_NODEID must be a number, but it is ''"):
        launcher({name: value for name, value in four_tasks[0].items() if name != "SLURM_NODEID"})


class NameService:
    """Resolver and `scontrol` with fixed answers, for a step of two nodes."""

    def __init__(self, folder: Path, step: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.step, self.resolved = folder, step, {"n2": ["198.51.100.2"]}
        monkeypatch.setattr("paceline.comm.network.addresses_of_name", lambda name: self.resolved.get(name, []))
        monkeypatch.setattr("paceline.comm.network.source_address", {"n2": "198.51.100.1"}.__getitem__)

    def master(self, node: int, node_address: str | None = None) -> str:
        """Return the master's address as seen by a node, with `node_address` as the first node's NodeAddr."""
        program = self.folder / "scontrol"
        program.write_text(f"#!/bin/sh\necho NodeName=n1 NodeAddr={node_address or '$5'} NodeHostName=n1\n")
        program.chmod(0o755)
        found = launcher(self.step | {"SLURM_NODEID": str(node), "PATH": f"{self.folder}:/usr/bin:/bin"})
        assert found is not None
        return (found.master or "").rpartition(":")[0]


@pytest.fixture
def names(tmp_path: Path, four_tasks: list[Environment], monkeypatch: pytest.MonkeyPatch) -> NameService:
    return NameService(tmp_path, four_tasks[0], monkeypatch)


def test_a_name_with_an_address_gives_the_master(names: NameService) -> None:
    names.resolved["n1"] = ["2001:db8::1", "198.51.100.1"]
    assert names.master(0) == names.master(1) == "198.51.100.1"
    names.resolved["n1"] = ["2001:db8::1"]
    assert names.master(1) == "[2001:db8::1]"


@pytest.mark.parametrize("resolved", [[], ["127.0.1.1"], ["127.0.1.1", "::1"]])
def test_a_name_without_a_reachable_address_uses_slurms_node_address(names: NameService, resolved: list[str]) -> None:
    names.resolved["n1"] = resolved
    assert names.master(0, "198.51.100.9") == names.master(1, "198.51.100.9") == "198.51.100.9"
    names.resolved["n1-net"] = ["198.51.100.8"]
    assert names.master(0, "n1-net") == names.master(1, "n1-net") == "198.51.100.8"


def test_the_first_node_uses_its_address_on_the_route_to_the_second(names: NameService) -> None:
    """The first node's name resolves to 127.0.1.1 on itself, and Slurm's NodeAddr is the same name."""
    names.resolved["n1"] = ["127.0.1.1"]
    assert names.master(0) == "198.51.100.1"
    with pytest.raises(
        LaunchError, match=r"no address of n1, the first node of this step, is known here.* to 127\.0\.1\.1"
    ) as e:
        names.master(1)
    assert "--master ADDRESS:" in (e.value.hint or "")


def test_a_mismatch_ends_a_command_before_anything_starts(slurm: Slurm, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline", "train", *TINY, "--ranks-per-host", "2"]
    done = slurm.call("srun", "--ntasks=1", *command, cwd=tmp_path)
    assert done.returncode == 2
    assert "error: 2 ranks per node were requested, but Slurm started 1 task (SLURM_NTASKS=1).\nhint: " in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.soak  # The suite has a comparison over two nodes.
def test_train_over_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline", "train", *TINY, "--out", "record"]
    done = slurm.call("srun", "--nodes=2", "--ntasks-per-node=1", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("record: ") == 1
    record = read_run(tmp_path / "record")
    assert (record.topology.world_size, record.topology.ranks_per_host) == (2, 1)
    assert sorted(record.steps) == [0, 1]


ODD = 'it\'s "quoted" \\ #1 $HOME %j'


def test_a_submitted_comparison_writes_its_records_where_submit_says(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "a b'c"
    folder.mkdir()
    own = ["--slurm", "--hosts", "2", "--ranks-per-host", "1", "--time", "5", f"--comment={ODD}", "--json"]
    own += ["--output", "%x-%u-%6j.100%%"]
    once = ["--repeats", "1", "--max-repeats", "1", "--no-proof", "--no-doctor", "--strategies", "allreduce,ddp"]
    command = [sys.executable, "-m", "paceline", "submit", *own, "--", "compare", *TINY, *once]
    done = slurm.call(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    submitted = json.loads(done.stdout)
    shown = slurm.run("scontrol", "show", "job", str(submitted["job"]))
    assert f"Comment={ODD}" in shown
    assert submitted["log"] == f"{folder}/paceline-compare-{getpass.getuser()}-{submitted['job']:06d}.100%"
    assert "NumNodes=2" in shown
    wait_for_job(slurm, submitted["job"])
    log_text = Path(submitted["log"]).read_text()
    experiment = read_experiment(Path(submitted["records"]))
    assert [candidate.name for candidate in experiment.candidates] == ["allreduce", "ddp"], log_text
    report = slurm.call(sys.executable, "-m", "paceline", "report", submitted["records"], "--json")
    assert report.returncode == 0, report.stderr
    assert all(row["step_s"] for row in json.loads(report.stdout)["rows"]), log_text


@pytest.mark.parametrize(
    ("stop", "received"),
    [
        (("scontrol", "requeue"), "SIGTERM"),
        pytest.param(("scancel", "--signal=USR1"), "SIGUSR1", marks=pytest.mark.soak),  # As before the time limit.
    ],
)
def test_a_job_that_is_stopped_comes_back_and_resumes(
    slurm: Slurm, tmp_path: Path, stop: tuple[str, ...], received: str
) -> None:
    own = ["--requeue", "--hosts", "2", "--ranks-per-host", "1", "--time", "5", "--json", f"--chdir={USER_CODE}"]
    command = ["train", "user_workloads:slow", "--batch", "16", "--steps", "200", "--checkpoint-every", "1000"]
    out, log = tmp_path / "run", tmp_path / "log"
    words = ["submit", *own, "--output", str(log), "--", *command, "--out", str(out)]
    done = slurm.call(sys.executable, "-m", "paceline", *words, cwd=USER_CODE)
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)["job"]
    wait_until(lambda: last_step(out), "the job trains")
    slurm.run(*stop, str(job))
    wait_for_job(slurm, job)
    output = log.read_text()
    assert f"{received} asked to stop: ranks write a checkpoint, within 30 s" in output
    record = read_run(out)
    (resumed,) = record.events_of(ResumedEvent)
    assert 0 < resumed.step < 200
    assert resumed.redone == 0
    assert f"did so after step {resumed.step}; its checkpoint is written." in output
    assert record.finished, output
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", str(job))


def test_an_error_is_shown_once_on_each_host(slurm: Slurm) -> None:
    done = slurm.call("srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "-m", "paceline", "train", "nosuch")
    assert done.returncode == UsageError.exit_code
    assert done.stderr.count("there is no workload 'nosuch'") == 2


def test_the_message_of_sbatch_is_shown(slurm: Slurm, tmp_path: Path) -> None:
    own = ["submit", "--slurm", "--partition", "gone", "--", "train", *TINY]
    done = slurm.call(sys.executable, "-m", "paceline", *own, cwd=tmp_path)
    assert done.returncode == 5
    assert "#SBATCH --partition=gone\n" in done.stdout
    assert "invalid partition specified: gone" in done.stderr
    assert "error: sbatch rejected the job.\n" in done.stderr
    assert not list(tmp_path.iterdir())
