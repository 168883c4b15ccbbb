"""One HTML file that needs nothing else, no network, no server, no other file; and what every such page says."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.analysis.record_set import RecordSet
from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.report.formatting import plural, size
from paceline.report.plots.drawing import LONGEST_LABEL, Json

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("theme.js", "tables.js", "figures.js")
LONGEST_HEADLINE = 90


def write_document(text: str, path: Path) -> None:
    """Writes a page; it is there in full or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise PacelineError(f"cannot write {path}: {error.strerror}.", hint="name another folder") from None
    finally:
        temporary.unlink(missing_ok=True)


def render_document(
    template: str, context: Mapping[str, Any], figures: Mapping[str, Json], legend: list[dict[str, str]]
) -> str:
    """The whole page as text: a template of ours, what it shows, and the figures that it has places for."""
    plotly, script = _plotly_js(), _own_js()
    page = _template(template).render(
        **context,
        figures={name: figure["title"] for name, figure in figures.items()},
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
        plotly=plotly,
        script=script,
        policy=_policy([plotly, script]),
        data=_json_for_script({"figures": figures, "candidates": legend}),
    )
    return str(page)


def _template(name: str) -> Any:
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
    return environment.get_template(name)


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


def _json_for_script(content: Any) -> str:
    """JSON that cannot end the element it stands in, whatever strings it holds."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


def split_headline(sentence: str) -> tuple[str, str]:
    """A sentence's claim and its reasons: "Pick ddp", then what makes it so."""
    claim, colon, reasons = sentence.partition(": ")
    if not colon or len(claim) > LONGEST_HEADLINE:
        return sentence.removesuffix("."), ""
    return claim, reasons


def origin_context(record_set: RecordSet) -> dict[str, Any]:
    """Where records come from, for the template: settings, machines, commands, folders."""
    return {
        "settings": _settings(record_set.config),
        "machines": [_machine(provenance) for provenance in _distinct(record_set.provenances)],
        "commands": list(dict.fromkeys(_again(p["command"]) for p in record_set.provenances if p.get("command"))),
        "sources": record_set.sources,
    }


def workload_in_words(record_set: RecordSet) -> str:
    """What was trained."""
    names = {entry.run.topology.get("workload") for entry in record_set.runs}
    if len(names) == 1:
        return str(names.pop())
    workload, data = record_set.config.get("workload"), record_set.config.get("data")
    if workload is None:
        return "several workloads"
    return str(workload) if ":" in workload or data is None else f"{workload} on {data}"


def date_in_words(text: str | None) -> str | None:
    """When something was measured."""
    try:
        when = datetime.strptime(text or "", "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return text
    return f"{when.day} {when:%B %Y, %H:%M} {'UTC' if not when.utcoffset() else when.strftime('%z')}"


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
        "measured": date_in_words(provenance.get("time")),
    }
    return [(name, str(value)) for name, value in facts.items() if value]
