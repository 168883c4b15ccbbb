"""Windows that profiling ends early or distorts, and the content of a profile."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.measure.profiler import TOP, StepProfiler, top_operators
from paceline.records import RunFolder
from paceline.records.profile import Operator, read_profile

CPU = torch.device("cpu")


def profiler(first: int, last: int, folder: Path = Path()) -> StepProfiler:
    return StepProfiler(range(first, last + 1), RunFolder(folder), 0, CPU)


@pytest.mark.parametrize(("step", "end", "expected"), [(0, 5, 5), (5, 20, 8), (8, 20, 11), (8, 9, 9), (11, 20, 20)])
def test_windows_end_before_and_after_profiled_steps(step: int, end: int, expected: int) -> None:
    assert profiler(8, 10).window_end(step, end) == expected


@pytest.mark.parametrize(
    ("start", "end", "period", "distorted"),
    [
        (5, 8, 1, False),
        (8, 11, 1, True),
        (10, 20, 1, True),
        (11, 20, 1, False),
        (4, 8, 4, False),
        (11, 12, 4, True),  # Three steps of a period of four were cut off.
        (12, 16, 4, False),
    ],
)
def test_windows_with_profiled_steps_or_parts_of_periods_are_distorted(
    start: int, end: int, period: int, distorted: bool
) -> None:
    assert profiler(8, 10).distorts(start, end, period=period, warm_up=4) == distorted


def test_the_rest_of_a_warm_up_is_still_warm_up() -> None:
    assert profiler(2, 3).distorts(4, 5, period=1, warm_up=5)
    assert not profiler(2, 3).distorts(5, 9, period=1, warm_up=5)


def test_only_the_chosen_steps_are_profiled(tmp_path: Path) -> None:
    """Oracle: a linear layer multiplies matrices once in forward and, without an input gradient, once in backward."""
    model, x = nn.Linear(8, 4), torch.randn(2, 8)
    watched = profiler(2, 4, tmp_path)
    for step in range(7):
        watched.start_if_due(step)
        model(x).sum().backward()
        watched.stop_if_due(step + 1)
    found = read_profile(tmp_path / "profile-0.json")
    by_name = {operator.name: operator for operator in found.operators}
    assert (found.first_step, found.last_step) == (2, 4)
    assert by_name["aten::addmm"].calls == 1
    assert by_name["aten::mm"].calls == 1
    assert by_name["aten::linear"].cpu_s is not None
    assert by_name["aten::linear"].cpu_s > by_name["aten::linear"].self_cpu_s
    assert 0 < sum(operator.self_cpu_s for operator in found.operators) < found.step_s
    assert not found.on_device
    trace = json.loads(gzip.decompress((tmp_path / "profile-0.trace.json.gz").read_bytes()))
    named = [event["name"] for event in trace["traceEvents"]]
    assert named.count("aten::addmm") == 3
    assert not list(tmp_path.glob(".*"))


def test_a_run_that_ends_during_profiling_writes_a_profile(tmp_path: Path) -> None:
    watched = profiler(1, 9, tmp_path)
    watched.start_if_due(1)
    torch.ones(3).sum()
    watched.stop_if_due(2)
    assert not (tmp_path / "profile-0.json").exists()
    watched.close(3)
    watched.close(3)
    assert read_profile(tmp_path / "profile-0.json").last_step == 2


def test_a_run_that_ends_before_profiling_writes_nothing(tmp_path: Path) -> None:
    watched = profiler(8, 9, tmp_path)
    watched.start_if_due(0)
    watched.stop_if_due(5)
    watched.close(5)
    assert not list(tmp_path.iterdir())


def test_the_longest_operators_are_kept_and_the_others_summed() -> None:
    many = [Operator(f"op {n}", 2, n, n, 0, 0) for n in range(TOP + 3)]
    top, rest = top_operators(many)
    assert [operator.self_cpu_s for operator in top] == list(range(TOP + 2, 2, -1))
    assert rest == Operator("3 others", 6, 0 + 1 + 2, None, 0, None)
    assert top_operators(many[:2]) == ([many[1], many[0]], None)


def test_on_a_gpu_operators_are_ordered_by_device_time() -> None:
    busy, lazy = Operator("busy", 1, 9, 9, 0, 0), Operator("lazy", 1, 1, 1, 5, 5)
    assert top_operators([busy, lazy])[0] == [lazy, busy]


@pytest.mark.gpu
def test_kernels_are_attributed_to_the_operators_that_launched_them(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    x = torch.randn(512, 512, device=device)
    watched = StepProfiler(range(2), RunFolder(tmp_path), 0, device)
    watched.start_if_due(0)
    for _ in range(2):
        x @ x
    torch.cuda.synchronize()
    watched.stop_if_due(2)
    found = read_profile(tmp_path / "profile-0.json")
    (product,) = [operator for operator in found.operators if operator.name == "aten::mm"]
    assert found.on_device
    assert product.calls == 1
    assert 0 < product.self_device_s <= found.step_s
    attributed_s = sum(operator.self_device_s for operator in found.operators)
    assert attributed_s == pytest.approx(product.self_device_s, rel=0.01), "no kernel counts twice"
