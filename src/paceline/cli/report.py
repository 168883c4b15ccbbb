"""`paceline report`: the page, and the tables, from records alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.messages import data_console


def command(
    folders: Annotated[list[Path], typer.Argument(help="Experiments or runs, or folders that hold some.")],
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
    from paceline.analysis.comparison import compare
    from paceline.analysis.pool import pool
    from paceline.records.find import find_records
    from paceline.records.schema import REPORT_FILE
    from paceline.records.writer import strict
    from paceline.report.comparison import print_comparison, to_json
    from paceline.report.csv_tables import write_tables
    from paceline.report.page import write_page
    from paceline.report.trace import where_traces_are, write_traces

    comparison = compare(pool(find_records(folders)))
    page = out or (folders[0] / REPORT_FILE if len(folders) == 1 else Path(REPORT_FILE))
    tables = write_tables(comparison, csv) if csv else []
    traces = write_traces(entry.run for entry in comparison.pool.entries) if trace else []
    if not as_json:
        print_comparison(comparison, data_console())
    write_page(comparison, page)
    if as_json:
        files = {"report": str(page), "traces": [str(path) for path in traces]}
        typer.echo(json.dumps(strict(to_json(comparison) | files), indent=2, allow_nan=False))
        return
    for path in [page, *tables]:
        typer.echo(f"wrote {path}")
    if traces:
        typer.echo(where_traces_are(traces))
