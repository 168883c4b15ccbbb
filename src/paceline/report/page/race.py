"""HTML report of a race."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.analysis.race.race import Race
from paceline.formatting import plural, whole
from paceline.report.definitions import RUN_TERM, SEED_TERM
from paceline.report.figures.columns import page_columns
from paceline.report.figures.figure import definitions
from paceline.report.figures.race import RACE_FIGURES
from paceline.report.page.document import render_document, write_document
from paceline.report.page.header import header_context, legend_of, run_facts
from paceline.report.page.tables import PageRow, PageTable, RowLabel
from paceline.report.plots.drawing import Json
from paceline.report.plots.palette import PARTS as PART_COLOURS
from paceline.report.plots.palette import colours
from paceline.report.plots.race import race_figure
from paceline.report.race_verdict import format_outcome, race_rules, sentences
from paceline.report.run_description import on_hosts

RACE_DEFINITIONS = definitions([RUN_TERM, SEED_TERM], RACE_FIGURES)
"""Definitions on the page, by key."""
CAPTION = (
    "One line per run, one point per evaluation, and the number of the run at its end. Dashed line: the target. Disc: "
    "target reached. Cross and dotted line: target missed."
)


def write_race_page(race: Race, path: Path) -> None:
    """Write the page atomically."""
    write_document(render_race(race), path)


def render_race(race: Race) -> str:
    """Return the whole page as HTML."""
    return render_document("race.html", _context(race), race_plots(race), legend_of(race.record_set))


def race_plots(race: Race) -> dict[str, Json]:
    """Return every plot that has data to show, by name."""
    figure = race_figure(race)
    return {} if figure is None else {"race": figure}


def _context(race: Race) -> dict[str, Any]:
    """Return the data that the template shows."""
    verdict, *others = sentences(race)
    design = race.design
    batch = [] if design.batch is None else [f"global batch {whole(design.batch)}"]
    return {
        **header_context(race.comparison, verdict),
        "facts": [
            race.record_set.candidates[0].name,
            f"{plural(design.ranks, 'rank')}{on_hosts(design)}",
            *batch,
            *run_facts(race.record_set, noun="run"),
        ],
        "sentences": others,
        "notes": race.comparison.warnings,
        "rules": race_rules(design),
        "table": _table(race),
        "caption": CAPTION,
        "colours": colours(race.record_set.candidates),
        "part_colours": PART_COLOURS,
        "definitions": RACE_DEFINITIONS,
        "best": None,
        "next_command": None,
    }


def _table(race: Race) -> PageTable:
    return PageTable(
        "race-runs",
        "Table of runs",
        "Run",
        [
            PageRow(
                str(run.number),
                (RowLabel("Seed", SEED_TERM.key, str(run.seed)),),
                "" if run.outcome == "reached" else "unmeasured",
                format_outcome(run),
                "bad",
            )
            for run in race.runs
        ],
        page_columns(RACE_FIGURES, race.runs),
        RUN_TERM.key,
        classes="wide",
    )
