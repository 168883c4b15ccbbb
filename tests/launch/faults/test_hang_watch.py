"""Hangs that are really brought about: they are named, all ranks end, and a restart cures them."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import pytest

from cli.test_compare import ONCE, compare, rows
from cli.test_train import ranks_of
from commands import USER_CODE, command, paceline, wait_until
from paceline.errors import HangError, LaunchError, RankError
from paceline.launch.emulation.hosts import emulated_hosts
from paceline.launch.faults.restarts import last_step
from paceline.records import read_run

pytestmark = pytest.mark.takes(40)

HANG = ("--hang-timeout", "3")
RUN = ("--batch", "16", "--steps", "50", *HANG)


def test_a_rank_that_sleeps_is_named_and_a_restart_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TEST_FAULT", f"sleeps {tmp_path / 'once'}")
    out = tmp_path / "run"
    checkpoints = ("--checkpoint-every", "20", "--checkpoint", "sync")
    done = paceline("train", "user_workloads:fails_once", *RUN, *checkpoints, "--max-restarts", "1", "--out", str(out))
    (line,) = [line for line in done.stderr.splitlines() if "restart" in line]
    assert line.startswith(
        "step 28: rank 0 waits in all_reduce (bucket 0, 60 B, with ranks 0, 1); rank 1 was last seen"
    )
    assert "in fail (user_workloads.py:" in line
    assert ", in the forward pass, " in line
    assert line.endswith("; restart 1 of 1 from the checkpoint of step 20")
    stacks = (out / "errors" / "hang.txt").read_text()
    assert "in backward" in stacks
    assert stacks.index("rank 1 was last seen") < stacks.index("in fail\n")
    record = read_run(out)
    assert record.finished
    assert not ranks_of(out)


def test_a_stopped_process_is_named_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TEST_FAULT", f"stopped {tmp_path / 'once'}")
    out = tmp_path / "run"
    done = paceline("train", "user_workloads:fails_once", *RUN, "--out", str(out), expect=HangError.exit_code)
    message, hint = done.stderr.splitlines()[-2:]
    assert message.startswith(
        "error: step 28: rank 0 waits in all_reduce (bucket 0, 60 B, with ranks 0, 1); rank 1 is "
    )
    assert ", state T), and was last seen " in message
    assert "what stopped the process" in hint
    assert str(out / "errors" / "hang.txt") in hint
    assert not ranks_of(out)


def test_a_strategy_that_skips_a_scatter_is_left_out_with_what_ranks_wait_in(tmp_path: Path) -> None:
    found = compare(
        "user_workloads:plain", "--strategies", "schemes:SkipsScatter,allreduce", *ONCE, *HANG, out=tmp_path / "out"
    )
    failed, trained = (rows(found)[name] for name in ("schemes:SkipsScatter", "allreduce"))
    assert "rank 0 waits in scatter (operation 2 of the step, " in failed["failure"]
    assert "rank 1 waits in gather (operation 2 of the step, " in failed["failure"]
    assert failed["failure"].count(" at schemes.py:") == 2
    assert trained["failure"] is None
    assert trained["repeats"] == 1


@pytest.mark.parametrize(
    ("strategy", "numbers", "calls"),
    [
        ("OtherSizes", "", ("all_reduce (float32 100, sum)", "all_reduce (float32 50, sum)")),
        ("OtherMessages", "50", ("send (float32 50)", "recv (float32 100)")),
    ],
)
def test_checked_collectives_name_both_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, numbers: str, calls: tuple[str, str]
) -> None:
    monkeypatch.setenv("PACELINE_TEST_NUMBERS", numbers)
    options = ("--strategy", f"schemes:{strategy}", "--check-collectives", "--out", str(tmp_path / "run"))
    done = paceline("train", "user_workloads:plain", *RUN, *options, expect=RankError.exit_code)
    message, hint = done.stderr.splitlines()[-2:]
    assert message.startswith(f"error: step 0: rank 0 called {calls[0]} at schemes.py:")
    assert f", but rank 1 called {calls[1]} at schemes.py:" in message
    assert "call the same collectives on all ranks" in hint


@pytest.mark.parametrize("numbers", ["150", pytest.param("50", marks=pytest.mark.soak)])
def test_an_unchecked_mismatch_suggests_to_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: str) -> None:
    """Gloo ends a process that receives more than it expects. It accepts less, so that replicas differ."""
    monkeypatch.setenv("PACELINE_TEST_NUMBERS", numbers)
    options = ("--strategy", "schemes:OtherMessages", "--out", str(tmp_path / "run"))
    done = paceline("train", "user_workloads:plain", *RUN, *options, expect=6 if numbers == "150" else 10)
    assert "--check-collectives" in done.stderr.splitlines()[-1]


def test_a_cut_link_is_named_with_what_ranks_wait_in(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("--ranks-per-host", "1", "--batch", "16", "--steps", "4000", *HANG, "--emulate", "2", "--out", str(out))
    words = command("train", "user_workloads:slow", *options)
    with emulated_hosts("2") as hosts:
        outputs = [tmp_path / f"host-{number}" for number in range(2)]
        processes = []
        for host, output in zip(hosts, outputs, strict=True):
            with output.open("w") as stream:
                processes.append(host.popen(*words, cwd=USER_CODE, stdout=stream, stderr=stream))
        try:
            wait_until(lambda: (last_step(out) or 0) >= 20, "two hosts train")
            hosts[1].run("ip", "link", "set", "eth0", "down")
            code = processes[0].wait(60)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    message = outputs[0].read_text().splitlines()[-2]
    assert code == LaunchError.exit_code, message
    assert message.startswith("error: lost contact with host 1 (host1): step ")
    assert "rank 0 waits in all_reduce (bucket 0, 60 B, with ranks 0, 1); rank 1 does not answer (nothing " in message
    # Its last report before the cut may be from any place of a step.
    seen = r"and was last seen in \S+ \(\w+\.py:\d+\), [^,]+(, in step \d+)?, \d+ s ago\.$"
    assert re.search(seen, message), message


@pytest.mark.soak
def test_a_cut_link_between_two_of_three_hosts(tmp_path: Path) -> None:
    """Both still reach host 0, so that only what ranks wait in shows it."""
    out = tmp_path / "run"
    options = ("--ranks-per-host", "1", "--batch", "24", "--steps", "4000", *HANG, "--emulate", "3", "--out", str(out))
    words = command("train", "user_workloads:slow", *options)
    with emulated_hosts("3") as hosts:
        processes = [host.popen(*words, cwd=USER_CODE, stderr=subprocess.PIPE, text=True) for host in hosts]
        try:
            wait_until(lambda: (last_step(out) or 0) >= 20, "three hosts train")
            for one, other in ((1, 2), (2, 1)):
                nowhere = ("lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "eth0")
                hosts[one].run("ip", "neigh", "replace", hosts[other].address, *nowhere)
            codes, messages = zip(*[(p.wait(60), p.communicate()[1]) for p in processes], strict=True)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert codes == (HangError.exit_code,) * 3
    assert "ranks 0-2 wait in all_reduce (bucket 0, 60 B, with ranks 0-2)." in messages[0]
    assert "hint: the connection between some of these ranks may be interrupted" in messages[0]


@pytest.mark.soak
@pytest.mark.parametrize("options", [(), ("--checkpoint-every", "20")])
def test_native_code_that_keeps_pythons_lock(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The rank cannot report; its launcher gets the stack by a signal."""
    out = tmp_path / "run"
    done = paceline("train", "user_workloads:keeps_the_lock", *RUN, *options, "--out", str(out), expect=13)
    assert "rank 1 does not answer (its process holds Python's lock in native code)" in done.stderr
    assert "in hang\n" in done.stderr
    assert not ranks_of(out)


@pytest.mark.soak
def test_a_rank_that_computes_for_long_is_not_hung(tmp_path: Path) -> None:
    done = paceline("train", "user_workloads:busy_on_rank_1", *RUN, "--out", str(tmp_path / "run"), "--json")
    assert json.loads(done.stdout)["steps"] == 50


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ddp", "allreduce"])
def test_a_program_under_torchrun_ends_by_itself(strategy: str) -> None:
    torchrun = [command()[0], "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = USER_CODE / "scripts" / "hangs.py"
    began_s = time.monotonic()
    done = subprocess.run([*torchrun, str(script), strategy], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert "error: step 5: rank 0 waits in " in done.stderr
    assert "rank 1 was last seen in load_batch (hangs.py:" in done.stderr
    assert "attach(…, hang_timeout=" in done.stderr
    assert time.monotonic() - began_s < 60
