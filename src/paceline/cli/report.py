"""`paceline report`: write the page and the tables from existing records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from paceline.cli.experiment_output import analyse_records
from paceline.cli.messages import data_console, message_console, print_json
from paceline.cli.requests import Request
from paceline.errors import PacelineError


@dataclass(frozen=True, kw_only=True)
class ReportRequest(Request):
    """Write the report from existing records, without torch.

    Several experiments or single runs are combined into one comparison. If they were recorded on different machines,
    the report contains a warning. For an examination by `paceline doctor`, the findings are printed again.
    """

    command: ClassVar[str] = "report"

    folders: Annotated[
        tuple[Path, ...],
        typer.Argument(help="Folders of experiments, runs or examinations, or folders that contain some."),
    ]
    out: Annotated[
        Path | None,
        typer.Option(
            help="File of the page [default: report.html in the given folder; for several, in the current folder]."
        ),
    ] = None
    csv: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also write the tables as CSV files into this folder.")
    ] = None
    trace: Annotated[
        bool, typer.Option("--trace", help="Also write each run's trace.json into its folder, for ui.perfetto.dev.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of a table.")] = False

    def carry_out(self) -> int:
        """Print and write what the folders contain: examinations, or runs and experiments."""
        from paceline.records.find import holds_examination

        if all(map(holds_examination, self.folders)):
            _show_examinations(
                self.folders, as_json=self.as_json, files_requested=bool(self.out or self.csv or self.trace)
            )
        else:
            self._report_runs()
        return 0

    def _report_runs(self) -> None:
        """Write the page, and the tables and traces if requested, and print the tables."""
        from paceline.records.find import find_records
        from paceline.records.schema import REPORT_FILE
        from paceline.report.trace import NOTHING_TO_TRACE, format_trace_paths, write_traces

        output = analyse_records(*find_records(list(self.folders)))
        page = self.out or (self.folders[0] / REPORT_FILE if len(self.folders) == 1 else Path(REPORT_FILE))
        tables = output.write_tables(self.csv) if self.csv else []
        traces: list[Path] = []
        failure: PacelineError | None = None
        traceable = [entry.run for entry in output.record_set.runs if self.trace and entry.run.timelines]
        try:
            traces = write_traces(traceable) if traceable else []
        except PacelineError as error:
            failure = error
        if not self.as_json:
            output.print_tables(data_console())
        output.write_page(page)
        if self.as_json:
            files = {"report": str(page), "traces": [str(path) for path in traces]}
            print_json(output.to_json() | files)
        else:
            for path in [page, *tables]:
                typer.echo(f"wrote {path}")
            if traces:
                typer.echo(format_trace_paths(traces))
        if self.trace and not traceable:
            message_console().print(NOTHING_TO_TRACE)
        if failure is not None:  # Raised last: the rest does not need the traces.
            raise failure


def _show_examinations(folders: Sequence[Path], *, as_json: bool, files_requested: bool) -> None:
    """Print examinations as tables or as JSON; several give a JSON list."""
    from paceline.records.examination import read_examination
    from paceline.report.terminal.doctor import print_examination, to_json

    examinations = {folder: read_examination(folder) for folder in folders}
    if as_json:
        contents = [to_json(examination, folder) for folder, examination in examinations.items()]
        print_json(contents[0] if len(contents) == 1 else contents)
    else:
        for folder, examination in examinations.items():
            if len(examinations) > 1:
                typer.echo(f"{folder}:")
            print_examination(examination, data_console())
    if files_requested:
        message_console().print("--out, --csv and --trace were ignored: the folders contain examinations and no runs.")
