"""Run an experiment and report its results: the tables, page, JSON and traces, also after a failure or Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import typer

from paceline.cli.interrupts import CtrlCHandler
from paceline.cli.messages import data_console, message_printer, print_json, show_error
from paceline.errors import PacelineError, UsageError
from paceline.report.terminal.lines import print_line

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.analysis.comparison import CandidateRow
    from paceline.analysis.record_set import RecordSet
    from paceline.records.find import Record
    from paceline.report.live.live_table import LiveTable


class Results(Protocol):
    """Results of an analysis."""

    @property
    def record_set(self) -> RecordSet:
        """Records that were analysed."""


ResultsType = TypeVar("ResultsType", bound=Results)


@dataclass(frozen=True)
class ExperimentOutput:
    """Analysed records of an experiment, and functions that print and write the results."""

    record_set: RecordSet
    rows: Sequence[CandidateRow]
    next_command: str | None
    """Command to run next; None if there is none to suggest."""
    print_tables: Callable[[Console], object]
    """Print the tables and the verdict."""
    write_page: Callable[[Path], object]
    write_tables: Callable[[Path], list[Path]]
    to_json: Callable[[], dict[str, Any]]

    @property
    def has_measurements(self) -> bool:
        """Whether at least one candidate has a measured step time."""
        return any(row.step_s for row in self.rows)


def analyse_records(records: Sequence[Record], read_warnings: Sequence[str] = ()) -> ExperimentOutput:
    """Analyse an experiment over ranks or batches, and a race, as such, and all other records as one comparison.

    `read_warnings` has a sentence on each record that was left out, because it is damaged.
    """
    from paceline.analysis.record_set import collect_records
    from paceline.records.schema import BATCH_KIND, LARGE_BATCH_KIND, RACE_KIND, SCALE_KIND

    outputs = {
        SCALE_KIND: _scaling_output,
        BATCH_KIND: _batch_output,
        LARGE_BATCH_KIND: _large_batch_output,
        RACE_KIND: _race_output,
    }
    names = {
        SCALE_KIND: "a scaling experiment",
        BATCH_KIND: "an experiment over batch sizes",
        LARGE_BATCH_KIND: "an experiment with large batches",
        RACE_KIND: "a race",
    }
    kind = next((kind for record in records if (kind := getattr(record, "kind", None)) in outputs), None)
    if kind is not None and len(records) > 1:
        if all(getattr(record, "kind", None) == RACE_KIND for record in records):
            raise UsageError(
                f"there are {len(records)} races, and each has its own page.",
                hint="`paceline race --leaderboard FOLDER` ranks them; for a page, give the folder of one race",
            )
        raise UsageError(
            f"{names[kind]} cannot be compared with other records.",
            hint=f"give only the folder of one `paceline {kind}` experiment",
        )
    record_set = collect_records(records, read_warnings)
    return _comparison_output(record_set) if kind is None else outputs[kind](record_set)


def _comparison_output(record_set: RecordSet) -> ExperimentOutput:
    from paceline.analysis.comparison import compare
    from paceline.report.page.comparison import write_page
    from paceline.report.tables.csv_files import write_tables
    from paceline.report.terminal.comparison import print_comparison, to_json
    from paceline.report.verdict.next_command import next_command

    found = compare(record_set)
    return _output(found, found.rows, print_comparison, write_page, write_tables, to_json, next_command(found))


def _scaling_output(record_set: RecordSet) -> ExperimentOutput:
    from paceline.analysis.scaling.curves import scaling
    from paceline.report.page.scaling import write_scaling_page
    from paceline.report.tables.scaling import write_scaling_tables
    from paceline.report.terminal.scaling import print_scaling, to_json

    found = scaling(record_set)
    return _output(found, found.comparison.rows, print_scaling, write_scaling_page, write_scaling_tables, to_json)


def _batch_output(record_set: RecordSet) -> ExperimentOutput:
    from paceline.analysis.batch.sizes import batch_sizes
    from paceline.report.batch_verdict import next_command
    from paceline.report.page.batch import write_batch_page
    from paceline.report.tables.batch import write_batch_tables
    from paceline.report.terminal.batch import print_batch_sizes, to_json

    found = batch_sizes(record_set)
    rows, command = found.comparison.rows, next_command(found)
    return _output(found, rows, print_batch_sizes, write_batch_page, write_batch_tables, to_json, command)


def _large_batch_output(record_set: RecordSet) -> ExperimentOutput:
    from paceline.analysis.large_batch.results import large_batches
    from paceline.report.page.large_batch import write_large_batch_page
    from paceline.report.tables.large_batch import write_large_batch_tables
    from paceline.report.terminal.large_batch import print_large_batches, to_json

    found = large_batches(record_set)
    return _output(
        found, found.comparison.rows, print_large_batches, write_large_batch_page, write_large_batch_tables, to_json
    )


def _race_output(record_set: RecordSet) -> ExperimentOutput:
    from paceline.analysis.race.race import race
    from paceline.report.page.race import write_race_page
    from paceline.report.tables.race import write_race_tables
    from paceline.report.terminal.race import print_race, to_json

    found = race(record_set)
    return _output(found, found.comparison.rows, print_race, write_race_page, write_race_tables, to_json)


def _output(
    found: ResultsType,
    rows: Sequence[CandidateRow],
    print_tables: Callable[[ResultsType, Console], object],
    write_page: Callable[[ResultsType, Path], object],
    write_tables: Callable[[ResultsType, Path], list[Path]],
    to_json: Callable[[ResultsType], dict[str, Any]],
    next_command: str | None = None,
) -> ExperimentOutput:
    return ExperimentOutput(
        found.record_set,
        rows,
        next_command,
        print_tables=partial(print_tables, found),
        write_page=partial(write_page, found),
        write_tables=partial(write_tables, found),
        to_json=partial(to_json, found),
    )


def run_and_report(
    run: Callable[[Callable[[Path], None]], None],
    display: LiveTable,
    messages: Console,
    *,
    as_json: bool,
    trace: bool,
) -> int:
    """Run an experiment and report its results; return the exit code.

    `run` calls its argument with the folder of the experiment as soon as that exists. Ctrl-C stops the experiment, but
    not the report, even if it is pressed several times. After a failure, the runs measured before it are reported, then
    the error is raised. If the experiment is not finished, the command that continues it is printed.
    """
    from paceline.records.experiment.record import read_experiment
    from paceline.records.provenance import command_line, with_out

    folders: list[Path] = []
    failure: PacelineError | None = None
    with CtrlCHandler() as ctrl_c:
        try:  # Covers everything up to `defer`, so that no Ctrl-C stays uncaught.
            try:
                with ctrl_c.errors_are_interrupts():
                    run(folders.append)
            except PacelineError as error:
                if not folders:
                    raise
                failure = error
            ctrl_c.defer()
        except KeyboardInterrupt:
            ctrl_c.defer()
            if not folders:
                raise
        if not folders:  # A follower host: only the leader has the records.
            return 0
        display.close()
        record = read_experiment(folders[0])
        output = analyse_records([record])
        if failure is None or output.has_measurements:
            trace_error = _report(output, folders[0], messages, as_json=as_json, trace=trace)
            failure = failure or trace_error
        if not record.finished:
            message_printer(messages)(f"to go on: {with_out(command_line(), folders[0])}")
    if failure is not None:  # Raised last, after the report of the runs before it.
        raise failure
    return ctrl_c.exit_code


def _report(
    output: ExperimentOutput, folder: Path, messages: Console, *, as_json: bool, trace: bool
) -> PacelineError | None:
    """Write the page and the traces, then print tables or JSON; one that fails does not prevent the others.

    An error of the page is printed, for example a missing package. An error of the traces is returned: the user
    requested them with an option.
    """
    from paceline.records.schema import REPORT_FILE
    from paceline.report.trace import format_trace_paths, write_traces

    report: Path | None = folder / REPORT_FILE
    traces: list[Path] = []
    failure: PacelineError | None = None
    try:
        output.write_page(folder / REPORT_FILE)
    except PacelineError as error:
        show_error(error, messages)
        report = None
    try:
        traces = write_traces(entry.run for entry in output.record_set.runs) if trace else []
    except PacelineError as error:
        failure = error
    if as_json:
        result = output.to_json() | {"report": report and str(report), "traces": [str(path) for path in traces]}
        print_json(result)
        return failure
    console = data_console()
    output.print_tables(console)
    if traces:
        typer.echo(format_trace_paths(traces))
    if report:
        print_line(console, f"report: {report}")
    if output.next_command:
        print_line(console, f"next:   {output.next_command}")
    return failure
