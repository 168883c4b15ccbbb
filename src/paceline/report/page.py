"""A comparison as one HTML file that needs nothing else: no network, no server, no other file."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import re
import shlex
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.analysis.comparison import Comparison, Row
from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.report.columns import comparison_columns, rank_columns
from paceline.report.definitions import DEFINITIONS
from paceline.report.drawing import LONGEST_LABEL, short_names, shortened
from paceline.report.evidence import parting_sentences, parting_words, proof_verdict, scientific
from paceline.report.figures import figures
from paceline.report.palette import colours
from paceline.report.sections import machine_context, step_context
from paceline.report.verdict import next_command, sentences
from paceline.report.words import plural, size

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("theme.js", "tables.js", "figures.js")
LONGEST_HEADLINE = 90


def write_page(comparison: Comparison, path: Path) -> None:
    """Writes the page; it is there in full or not at all."""
    text = render(comparison)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise PacelineError(f"cannot write {path}: {error.strerror}.", hint="name another folder") from None
    finally:
        temporary.unlink(missing_ok=True)


def render(comparison: Comparison) -> str:
    """The whole page as text."""
    plotly, script = _plotly_js(), _own_js()
    drawn = figures(comparison)
    page = _template().render(
        **_context(comparison),
        **step_context(comparison),
        **machine_context(comparison),
        figures={name: figure["title"] for name, figure in drawn.items()},
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
        plotly=plotly,
        script=script,
        policy=_policy([plotly, script]),
        data=_json_for_script({"figures": drawn, "contenders": _legend(comparison)}),
    )
    return str(page)


def _template() -> Any:
    try:
        import jinja2
    except ModuleNotFoundError:
        raise _missing("jinja2") from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment.get_template("page.html")


def _breakable(name: str) -> Any:
    """A name that may go over several lines where its parts meet, if it is a long one."""
    from markupsafe import Markup, escape

    parts = re.split(r"(?<=[,=:_])", name) if len(name) > LONGEST_LABEL else [name]
    return Markup("<wbr>").join(escape(part) for part in parts)


@lru_cache(maxsize=1)
def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise _missing("plotly") from None
    return str(get_plotlyjs()).strip()


def _missing(package: str) -> PacelineError:
    hint = f"pip install {package}, then `paceline report FOLDER`: the records are kept"
    return PacelineError(f"the page needs {package}, which is not installed.", hint=hint)


def _own_js() -> str:
    return "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)


def _policy(scripts: list[str]) -> str:
    """What the browser may do with the page: run our scripts, known by their hashes, and fetch nothing at all.

    Styles may be inline since plotly writes them; images may be made on the spot since figures are saved as such.
    """
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _legend(comparison: Comparison) -> list[dict[str, str]]:
    """Name, label and colour of every contender, in the order in which they were named."""
    labels = short_names([contender.name for contender in comparison.pool.contenders], 32)
    tints = colours(comparison.pool.contenders)
    return [{"name": name, "label": labels[name], "colour": tint} for name, tint in tints.items()]


def _json_for_script(content: Any) -> str:
    """JSON that cannot end the element it stands in, whatever strings it holds."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _context(comparison: Comparison) -> dict[str, Any]:
    """Everything the template shows, as text."""
    pool = comparison.pool
    verdict = sentences(comparison)
    headline, lead = _headline(verdict[0])
    return {
        "comparison": comparison,
        "title": _workload(comparison),
        "facts": _facts(comparison),
        "headline": headline,
        "lead": lead,
        "sentences": verdict[1:],
        "notes": comparison.warnings,
        "failures": [event for event in pool.events if event["event"] == "failure"],
        "next_command": next_command(comparison),
        "colours": colours(pool.contenders),
        "by_strategy": _by_strategy(comparison),
        "tags": {row.contender.name: _tag(comparison, row) for row in comparison.rows},
        "best": comparison.pick or comparison.decision.first,
        "columns": comparison_columns(comparison.rows, comparison.reference),
        "rank_rows": [(row, rank) for row in comparison.rows for rank in row.ranks],
        "rank_columns": rank_columns([rank for row in comparison.rows for rank in row.ranks]),
        "proof_verdict": proof_verdict,
        "scientific": scientific,
        "partings": [parting_words(parting) for parting in comparison.partings],
        "parting_sentences": list(parting_sentences(comparison)),
        "settings": _settings(pool.config),
        "machines": [_machine(provenance) for provenance in _distinct(pool.provenances)],
        "commands": list(dict.fromkeys(_again(p["command"]) for p in pool.provenances if p.get("command"))),
        "definitions": DEFINITIONS,
        "repeats": max((row.repeats for row in comparison.rows), default=0),
        "has_pale": bool(comparison.with_role("bound") or comparison.with_role("baseline")),
        "has_small_batches": _has_small_batches(comparison),
        "shortened": shortened,
    }


def _headline(sentence: str) -> tuple[str, str]:
    """A sentence's claim and its reasons: "Pick ddp", then what makes it so."""
    claim, colon, reasons = sentence.partition(": ")
    if not colon or len(claim) > LONGEST_HEADLINE:
        return sentence.removesuffix("."), ""
    return claim, reasons


def _workload(comparison: Comparison) -> str:
    names = {entry.run.topology.get("workload") for entry in comparison.pool.entries}
    if len(names) == 1:
        return str(names.pop())
    workload, data = comparison.pool.config.get("workload"), comparison.pool.config.get("data")
    if workload is None:
        return "several workloads"
    return str(workload) if ":" in workload or data is None else f"{workload} on {data}"


def _facts(comparison: Comparison) -> list[str]:
    """What was compared, on what, how often, and when: what is not known is left out."""
    pool = comparison.pool
    topologies = [entry.run.topology for entry in pool.entries]
    ranks = {d["ranks"] for d in pool.designs} or {t["world_size"] for t in topologies}
    batches = {row.batch for row in comparison.rows if row.batch}
    devices = {f"{t['device']} ({t['backend']})" for t in topologies if t.get("exchanges")}
    repeats = len({entry.repeat for entry in pool.entries})
    steps = {(entry.run.summary or {}).get("steps") for entry in pool.entries} - {None}
    return [
        _several(len(comparison.rows), "strategy" if _by_strategy(comparison) else "setting"),
        *[plural(n, "rank") for n in sorted(ranks)][:1],
        *([f"global batch {batches.pop():,}"] if len(batches) == 1 else []),
        *([devices.pop()] if len(devices) == 1 else []),
        *([plural(int(steps.pop() or 0), "step")] if len(steps) == 1 else []),
        plural(repeats, "repeat"),
        *[when for p in pool.provenances[:1] if (when := _date(p.get("time")))],
    ]


def _several(count: int, noun: str) -> str:
    return f"{count} strategies" if noun == "strategy" and count != 1 else plural(count, noun)


def _date(text: str | None) -> str | None:
    try:
        when = datetime.strptime(text or "", "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return text
    return f"{when.day} {when:%B %Y, %H:%M} {'UTC' if not when.utcoffset() else when.strftime('%z')}"


def _by_strategy(comparison: Comparison) -> bool:
    contenders = comparison.pool.contenders
    return len({contender.strategy for contender in contenders}) > 1 or not any(c.settings for c in contenders)


def _tag(comparison: Comparison, row: Row) -> str:
    """The word beside a name in the table."""
    decision, name = comparison.decision, row.contender.name
    if row.failure:
        return "failed"
    if name == comparison.pick:
        return "pick"
    if row.contender.role != "candidate":
        return row.contender.role
    return "equally fast" if decision.outcome == "same" and name in (decision.first, decision.second) else ""


def _has_small_batches(comparison: Comparison) -> bool:
    """Whether steps differ in samples enough for their times to show it."""
    samples = [
        steps["samples"] for entry in comparison.pool.entries for steps in entry.run.steps.values() if len(steps)
    ]
    return any(float(column.min()) < 0.9 * float(column.max()) for column in samples)


def _settings(config: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Name, value, and whether it was set: what differs from the defaults comes first."""
    defaults = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    known = [(key, _shown(value), key not in defaults or value != defaults[key]) for key, value in config.items()]
    return sorted(known, key=lambda setting: not setting[2])


def _shown(value: Any) -> str:
    if value in (None, "", []):
        return "default"
    if isinstance(value, list):
        return shlex.join(map(str, value))
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _again(command: str) -> str:
    """A command that can be typed again: without the folder that now holds its records."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    kept = [word for place, word in enumerate(words) if not _names_folder(words, place)]
    return shlex.join(kept)


def _names_folder(words: list[str], place: int) -> bool:
    before_script_args = "--" not in words[:place]
    named = words[place] == "--out" or words[place].startswith("--out=")
    return before_script_args and (named or (place > 0 and words[place - 1] == "--out"))


def _distinct(provenances: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One provenance per machine and version: runs of one experiment repeat it."""
    own = ("host", "system", "cpu", "cpu_count", "memory_bytes", "python", "versions", "commit")
    by_identity = {json.dumps([p.get(key) for key in own], sort_keys=True): p for p in reversed(provenances)}
    return list(reversed(by_identity.values()))


def _machine(provenance: dict[str, Any]) -> list[tuple[str, str]]:
    """A provenance as names and values."""
    versions = [f"{name} {version}" for name, version in provenance.get("versions", {}).items() if version]
    cores = provenance.get("cpu_count")
    facts = {
        "host": provenance.get("host"),
        "processor": provenance.get("cpu") and f"{provenance['cpu']}, {plural(cores or 1, 'core')}",
        "memory": provenance.get("memory_bytes") and size(provenance["memory_bytes"]),
        "system": provenance.get("system"),
        "versions": ", ".join([f"Python {provenance.get('python')}", *versions]),
        "commit": provenance.get("commit"),
        "measured": _date(provenance.get("time")),
    }
    return [(name, str(value)) for name, value in facts.items() if value]
