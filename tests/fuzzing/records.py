"""Parsers of records: each file of a run, an experiment and an examination, and the report on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from rich.console import Console

from examinations import examination
from experiments_on_disk import CLASSIC, write_experiment
from fuzzing.mutations import change_bytes, change_json
from fuzzing.parser import Parser, Prepared
from paceline.analysis.summary import summarise
from paceline.cli.experiment_output import analyse_records
from paceline.config import RunConfig
from paceline.errors import PacelineError, RecordError
from paceline.launch.channel.messages import from_text
from paceline.launch.faults.failures import RankFailure
from paceline.launch.job import Job
from paceline.records import RunFolder
from paceline.records.decoder import read_model
from paceline.records.examination import read_examination, write_examination
from paceline.records.experiment.record import read_experiment
from paceline.records.find import find_records
from paceline.records.parity import Parity
from paceline.records.profile import Operator, Profile, write_profile
from paceline.records.reader import RunRecord, read_run
from paceline.records.schema import MARKS_HEADER, RESOURCES_HEADER, MarkRow, ResourceRow
from paceline.report.terminal.run import print_run
from paceline.report.trace import write_traces

RUN = Path("repeat-1/4")
RESOURCES = [
    ResourceRow(0.1, 0.2, 3 << 20, 4, 0.001, None, None, 0.5, 1 << 30, 2 << 30),
    ResourceRow(0.2, 0.3, 4 << 20, 4, 0.002, 5, 6, None, None, None),
]
MARKS = [MarkRow("evaluation", 0.1, 0.2, "0"), MarkRow("epoch", 0.3, 0.3, "0"), MarkRow("gc", 0.4, 0.5, "2")]
OPERATOR = Operator("aten::mm", 2.0, 0.1, 0.2, 0.0, 0.0)
FAILURE = RankFailure(kind="ValueError", message="m", rank=1, time_ns=5, known=False, peer_lost=False)


def write_whole_experiment(folder: Path) -> Path:
    """Write an experiment that has every kind of file, and return the folder of the run that has them."""
    write_experiment(folder, repeats=2, steps=8, events=True, evaluations=(4, 8))
    run = folder / RUN
    (run / "resources-0.csv").write_text(RESOURCES_HEADER + "".join(row.to_csv() for row in RESOURCES))
    (run / "marks-0.csv").write_text(MARKS_HEADER + "".join(row.to_csv() for row in MARKS))
    write_profile(Profile(1, 2, 0.1, [OPERATOR], OPERATOR), RunFolder(run), 0)
    write_examination(folder, examination())
    return run


def _read_all(run: RunRecord) -> None:
    """Read the files that are read on demand, and compute and print what `paceline train` does."""
    _ = run.timelines, run.resources, run.marks, run.profiles
    summarise(run)
    with Path("/dev/null").open("w") as nowhere:
        print_run(run, Console(file=nowhere, width=100))


def _file_of_run(name: str) -> Callable[[Path], Prepared]:
    """Return a function that prepares damage to one file of a run, which is read as a whole."""

    def prepare(folder: Path) -> Prepared:
        run = write_whole_experiment(folder / "e")

        def parse(content: bytes) -> None:
            (run / name).write_bytes(content)
            _read_all(read_run(run))

        return Prepared([(run / name).read_bytes()], parse)

    return prepare


def _file_of_experiment(name: str) -> Callable[[Path], Prepared]:
    def prepare(folder: Path) -> Prepared:
        path = write_experiment(folder / "e", CLASSIC[2:], repeats=1, steps=4)

        def parse(content: bytes) -> None:
            (path / name).write_bytes(content)
            read_experiment(path)

        return Prepared([(path / name).read_bytes()], parse)

    return prepare


def _prepare_model(name: str, content: Any, kind: type[Any]) -> Callable[[Path], Prepared]:
    def prepare(folder: Path) -> Prepared:
        file = folder / name

        def parse(written: bytes) -> None:
            file.write_bytes(written)
            read_model(file, kind, "content")

        return Prepared([msgspec.json.encode(content)], parse)

    return prepare


def _prepare_examination(folder: Path) -> Prepared:
    write_examination(folder, examination())
    file = folder / "doctor.json"
    seed = file.read_bytes()

    def parse(content: bytes) -> None:
        file.write_bytes(content)
        read_examination(folder)

    return Prepared([seed], parse)


def _prepare_job(folder: Path) -> Prepared:
    job = Job.single(RunConfig(), RunFolder(folder), iface=None, threads=2)

    def parse(content: bytes) -> None:
        found = from_text(content, Job)
        assert from_text(found.to_json(), Job) == found

    return Prepared([job.to_json().encode()], parse)


Change = tuple[Path, bytes]
"""A file of an experiment, and its content."""


def change_file(change: Change, others: Sequence[Change], random: Random) -> Change:
    """Damage one file of an experiment by the changes of its kind."""
    file, content = change
    damage = change_json if file.suffix in (".json", ".jsonl") else change_bytes
    return file, damage(content, [content for _, content in others], random)


def _prepare_report(folder: Path) -> Prepared:
    path = folder / "e"
    write_whole_experiment(path)
    files = [path / RUN / name for name in ("run.json", "summary.json", "events.jsonl", "rank-0.csv", "timeline-0.bin")]
    files += [path / RUN / name for name in ("resources-0.csv", "marks-0.csv", "profile-0.json")]
    files += [path / name for name in ("experiment.json", "events.jsonl", "doctor.json")]

    def parse(change: Change) -> None:
        file, content = change
        whole = file.read_bytes()
        file.write_bytes(content)
        try:
            report(path)
        finally:
            file.write_bytes(whole)

    return Prepared([(file, file.read_bytes()) for file in files], parse)


def report(path: Path) -> None:
    """Make everything that `paceline report` prints and writes."""
    output = analyse_records(*find_records([path]))
    with Path("/dev/null").open("w") as nowhere:
        output.print_tables(Console(file=nowhere, width=150))
    output.write_page(path / "report.html")
    output.write_tables(path / "csv")
    output.to_json()
    write_traces(entry.run for entry in output.record_set.runs if entry.run.timelines)


PARSERS = (
    *(
        Parser(f"run: {name}", _file_of_run(name), change, str(RUN), RecordError, weight=10)
        for name, change in (
            ("run.json", change_json),
            ("summary.json", change_json),
            ("events.jsonl", change_json),
            ("rank-0.csv", change_bytes),
            ("timeline-1.bin", change_bytes),
            ("resources-0.csv", change_bytes),
            ("marks-0.csv", change_bytes),
            ("profile-0.json", change_json),
        )
    ),
    *(
        Parser(f"experiment: {name}", _file_of_experiment(name), change_json, name, RecordError, weight=35)
        for name in ("experiment.json", "events.jsonl")
    ),
    Parser("doctor.json", _prepare_examination, change_json, "doctor.json", RecordError, weight=37),
    Parser(
        "parity.json",
        _prepare_model("parity.json", Parity("ddp", 2, 1e-8, 1.0, 1e-5, True, 3), Parity),
        change_json,
        "parity.json",
        RecordError,
        weight=20,
    ),
    Parser(
        "errors of ranks",
        _prepare_model("rank-1.json", FAILURE, RankFailure),
        change_json,
        "rank-1.json",
        RecordError,
        weight=20,
    ),
    Parser("job of a launcher", _prepare_job, change_json, error=(ValueError, PacelineError), weight=20),
    Parser("report", _prepare_report, change_file, error=RecordError, weight=1, slow=True),
)
