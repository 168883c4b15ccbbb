"""Tests of the terminal output of a comparison, at any width, and of its JSON."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from experiments_on_disk import CLASSIC, read_comparison, write_experiment
from paceline.records import RunFolder, read_run
from paceline.records.experiment.design import Candidate
from paceline.records.profile import Operator, Profile, write_profile
from paceline.records.schema import ResourceRow
from paceline.records.writer import ResourceWriter, json_safe
from paceline.report.tables.json_rows import run_json
from paceline.report.terminal.comparison import print_comparison, to_json


def printed(path: Path, width: int) -> list[str]:
    stream = io.StringIO()
    print_comparison(read_comparison(path), Console(file=stream, width=width, color_system=None))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_every_width_has_names_and_times(tmp_path: Path, width: int) -> None:
    lines = printed(write_experiment(tmp_path / "e"), width)[:5]
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith("strategy")
    assert [line.split()[0] for line in lines[1:]] == ["single", "none", "allreduce", "ddp"]
    assert all(" ms" in line for line in lines[1:])
    assert "…" not in "".join(lines)


def test_a_wide_screen_has_all_columns_and_a_narrow_one_the_most_needed(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e")
    assert printed(path, 150)[0].split("  ")[-1].strip() == "memory"
    narrow = printed(path, 60)[0]
    assert "time/step" in narrow
    assert "÷ ddp" in narrow
    assert "test loss" not in narrow


def test_an_empty_accuracy_column_is_dropped_first(tmp_path: Path) -> None:
    tested, untested = write_experiment(tmp_path / "a"), write_experiment(tmp_path / "b", accuracy=None)
    assert "accuracy" in printed(tested, 100)[0]
    assert "accuracy" not in printed(untested, 100)[0]


def test_a_long_name_does_not_push_the_times_away(tmp_path: Path) -> None:
    candidates = [Candidate(f"ddp:bucket_mb={n},overlap=false bn=broadcast", "ddp") for n in (1, 25)]
    lines = printed(write_experiment(tmp_path / "e", candidates), 80)
    assert "ddp:bucket_mb=1" in lines[1]
    assert " ms" in lines[1]


def test_brackets_in_a_name_are_not_markup(tmp_path: Path) -> None:
    candidates = [Candidate("[bold]a", "ddp"), *CLASSIC]
    assert any(line.startswith("[bold]a") for line in printed(write_experiment(tmp_path / "e", candidates), 150))


def test_failures_are_named_under_the_table(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", failures={"allreduce": "rank 1 died"})
    lines = printed(path, 150)
    assert any(line.startswith("allreduce (failed)") for line in lines)
    assert "allreduce failed: rank 1 died" in lines


def test_json_is_json_even_when_a_run_diverged(tmp_path: Path) -> None:
    path = write_experiment(
        tmp_path / "e", losses=lambda c, _, step: math.nan if c.name == "allreduce" and step > 4 else 2.0
    )
    text = json.dumps(json_safe(to_json(read_comparison(path))), allow_nan=False)
    assert json.loads(text)["rows"]


def test_json_has_resources_and_operators(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "e", CLASSIC[3:], repeats=1)
    run = RunFolder(path / "repeat-1" / "1")
    writer = ResourceWriter(run, 0)
    base = ResourceRow(0, 0, 100, 4, 0, None, None, None, None, None)
    writer.write([base._replace(time_s=t, cpu_s=t, sampler_cpu_s=t / 100, host_used_bytes=7) for t in (0.0, 1.0)])
    writer.close()
    operator = Operator("aten::mm", 3, 0.3, 0.4, 0.0, 0.0)
    write_profile(Profile(5, 6, 0.1, [operator], rest=None), run, 0)
    found = to_json(read_comparison(path))
    assert found["resources"]["ddp"]["ranks"][0]["cpu_share"] == pytest.approx(1)
    assert found["resources"]["ddp"]["hosts"][0]["used_bytes"] == 7
    assert found["sampling_share"] == pytest.approx(0.01)
    assert [row["name"] for row in found["operators"]["ddp"]] == ["aten::mm"]
    alone = run_json(read_run(run.path))
    assert alone["operators"] == found["operators"]["ddp"]
    assert alone["resources"] == found["resources"]["ddp"]
