"""What commands share that make something of records, and report what was measured also after a failure or Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.interrupts import CtrlC
from paceline.cli.messages import data_console, show_error
from paceline.errors import INTERRUPTED_EXIT_CODE, PacelineError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.analysis.comparison import CandidateRow
    from paceline.analysis.record_set import RecordSet
    from paceline.records.find import Record
    from paceline.report.live.live_table import LiveTable


@dataclass(frozen=True)
class ExperimentOutput:
    """What can be made of records."""

    record_set: RecordSet
    rows: Sequence[CandidateRow]
    show: Callable[[Console], None]
    """Prints tables and sentences."""
    show_end: Callable[[Path | None, Console], None]
    """Prints where the page is, and what to type next."""
    write_page: Callable[[Path], None]
    write_tables: Callable[[Path], list[Path]]
    to_json: Callable[[], dict[str, Any]]

    @property
    def measured(self) -> bool:
        """Whether there is a figure to show."""
        return any(row.step_s for row in self.rows)


def output_of(records: Sequence[Record]) -> ExperimentOutput:
    """A scaling experiment has a report of its own; all else is compared."""
    from paceline.analysis.record_set import collect_records
    from paceline.analysis.scaling.curves import KIND

    of_scaling = [getattr(record, "kind", None) == KIND for record in records]
    if any(of_scaling) and len(records) > 1:
        raise UsageError(
            "a scaling experiment cannot be compared with other records.",
            hint="name the folder of one `paceline scale`",
        )
    return _of_scaling(collect_records(records)) if any(of_scaling) else _of_comparison(collect_records(records))


def _of_comparison(pooled: RecordSet) -> ExperimentOutput:
    from paceline.analysis.comparison import compare
    from paceline.report.page.comparison import write_page
    from paceline.report.tables.csv_files import write_tables
    from paceline.report.terminal.comparison import print_comparison, print_next, to_json

    found = compare(pooled)
    return ExperimentOutput(
        pooled,
        found.rows,
        show=lambda console: print_comparison(found, console),
        show_end=lambda report, console: print_next(found, report, console),
        write_page=lambda path: write_page(found, path),
        write_tables=lambda folder: write_tables(found, folder),
        to_json=lambda: to_json(found),
    )


def _of_scaling(pooled: RecordSet) -> ExperimentOutput:
    from paceline.analysis.scaling.curves import scaling
    from paceline.report.page.scaling import write_scaling_page
    from paceline.report.tables.scaling import write_scaling_tables
    from paceline.report.terminal.scaling import print_report, print_scaling, to_json

    found = scaling(pooled)
    return ExperimentOutput(
        pooled,
        found.comparison.rows,
        show=lambda console: print_scaling(found, console),
        show_end=print_report,
        write_page=lambda path: write_scaling_page(found, path),
        write_tables=lambda folder: write_scaling_tables(found, folder),
        to_json=lambda: to_json(found),
    )


def carry_out(
    run: Callable[[Callable[[Path], None]], None],
    display: LiveTable,
    messages: Console,
    *,
    as_json: bool,
    trace: bool,
) -> int:
    """Runs an experiment, which tells its folder as soon as it is there, and reports it; returns the exit code.

    Ctrl-C ends the experiment and not the report, however often and whenever it is pressed.
    """
    from paceline.records.experiment import read_experiment

    folders: list[Path] = []
    failure: PacelineError | None = None
    interrupted = False
    with CtrlC() as ctrl_c:
        try:  # Covers everything up to `hold`, so that no Ctrl-C is left uncaught.
            try:
                run(folders.append)
            except Exception as error:
                if ctrl_c.came:  # A library turned Ctrl-C into an error of its own.
                    raise KeyboardInterrupt from error
                if not folders or not isinstance(error, PacelineError):
                    raise
                failure = error
            ctrl_c.hold()
        except KeyboardInterrupt:
            ctrl_c.hold()
            if not folders:
                raise
            interrupted = True
        if not folders:  # A host that took part, and has nothing to show.
            return 0
        display.close()
        outcome = output_of([read_experiment(folders[0])])
        if failure is None or outcome.measured:
            missing = _report(outcome, folders[0], messages, as_json=as_json, trace=trace)
            failure = failure or missing
    if failure is not None:  # After the report of what was measured before it.
        raise failure
    return INTERRUPTED_EXIT_CODE if interrupted or ctrl_c.came else 0


def _report(
    outcome: ExperimentOutput, folder: Path, messages: Console, *, as_json: bool, trace: bool
) -> PacelineError | None:
    """The page and the traces, then tables or JSON: what was measured is not lost where one cannot be made.

    Traces were asked for: why they could not be made is returned. A page that needs what is not installed is only said.
    """
    from paceline.records.schema import REPORT_FILE
    from paceline.records.writer import strict
    from paceline.report.trace import format_trace_paths, write_traces

    report: Path | None = folder / REPORT_FILE
    traces: list[Path] = []
    failure: PacelineError | None = None
    try:
        outcome.write_page(folder / REPORT_FILE)
    except PacelineError as error:
        show_error(error, messages)
        report = None
    try:
        traces = write_traces(entry.run for entry in outcome.record_set.entries) if trace else []
    except PacelineError as error:
        failure = error
    if as_json:
        result = outcome.to_json() | {"report": report and str(report), "traces": [str(path) for path in traces]}
        typer.echo(json.dumps(strict(result), indent=2, allow_nan=False))
        return failure
    console = data_console()
    outcome.show(console)
    if traces:
        typer.echo(format_trace_paths(traces))
    outcome.show_end(report, console)
    return failure
