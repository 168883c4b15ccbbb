"""`paceline report`: the page, and the tables, from records alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.experiment_output import output_of
from paceline.cli.messages import data_console, messages
from paceline.errors import PacelineError


def command(
    folders: Annotated[
        list[Path], typer.Argument(help="Experiments, runs or the doctor's folders, or what holds some.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page [default: report.html in the folder; of several, in the current one].")
    ] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Also write the tables there, as CSV.")] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Also write each run's trace into its folder; ui.perfetto.dev opens them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of a table.")] = False,
) -> None:
    """Make the report again from records, on any machine: torch is not needed.

    Several experiments, or runs that were made one by one, come into one comparison; records of different machines
    too, with a warning.
    """
    from paceline.records.find import find_records, holds_examination

    if all(map(holds_examination, folders)):
        _show_examinations(folders, as_json=as_json, more=bool(out or csv or trace))
        return

    from paceline.records.schema import REPORT_FILE
    from paceline.records.writer import strict
    from paceline.report.trace import NOTHING_TO_TRACE, format_trace_paths, write_traces

    report = output_of(find_records(folders))
    page = out or (folders[0] / REPORT_FILE if len(folders) == 1 else Path(REPORT_FILE))
    tables = report.write_tables(csv) if csv else []
    traces: list[Path] = []
    failure: PacelineError | None = None
    traceable = [entry.run for entry in report.record_set.entries if trace and entry.run.timelines]
    try:
        traces = write_traces(traceable) if traceable else []
    except PacelineError as error:
        failure = error
    if not as_json:
        report.show(data_console())
    report.write_page(page)
    if as_json:
        files = {"report": str(page), "traces": [str(path) for path in traces]}
        typer.echo(json.dumps(strict(report.to_json() | files), indent=2, allow_nan=False))
    else:
        for path in [page, *tables]:
            typer.echo(f"wrote {path}")
        if traces:
            typer.echo(format_trace_paths(traces))
    if trace and not traceable:
        messages().print(NOTHING_TO_TRACE)
    if failure is not None:  # After all that could be reported.
        raise failure


def _show_examinations(folders: list[Path], *, as_json: bool, more: bool) -> None:
    """What the doctor found: in the terminal, or as JSON, which is a list where there are several."""
    from paceline.records.examination import read_examination
    from paceline.records.writer import strict
    from paceline.report.terminal.doctor import print_examination, to_json

    found = {folder: read_examination(folder) for folder in folders}
    if as_json:
        contents = [to_json(examination, folder) for folder, examination in found.items()]
        content = strict(contents[0] if len(contents) == 1 else contents)
        typer.echo(json.dumps(content, indent=2, allow_nan=False))
    else:
        for folder, examination in found.items():
            if len(found) > 1:
                typer.echo(f"{folder}:")
            print_examination(examination, data_console())
    if more:
        messages().print("There is no run to make a page, tables or a trace of.")
