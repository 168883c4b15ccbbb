"""Rendering of a self-contained HTML file (no network, no server, no other file), and the parts all pages share."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from paceline.analysis.record_set import RecordSet
from paceline.config import RunConfig
from paceline.errors import PacelineError
from paceline.formatting import plural, size
from paceline.records.atomic_file import atomic_file
from paceline.records.provenance import Provenance
from paceline.records.settings import Settings
from paceline.report.plots.drawing import Json

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("theme.js", "tables.js", "figures.js")
LONGEST_HEADLINE = 90
SHORT_WORD = 12
"""Characters of a word that fits on a line everywhere."""
PARTS_OF_NAME = re.compile(r"(?<=[,=:])(?=.)")
WORDS_OF_PART = re.compile(r"(?<=[_./])(?=\w)|(?<=[a-z])(?=[A-Z])")
"""Places between the options of a name, and between the words of an option or of a name in a program."""


def write_document(text: str, path: Path) -> None:
    """Write a page atomically; raise PacelineError if it cannot be written."""
    try:
        with atomic_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PacelineError(f"cannot write {path}: {error.strerror}.", hint="choose another folder") from None


def render_document(
    template: str, context: Mapping[str, Any], figures: Mapping[str, Json], legend: list[dict[str, str]]
) -> str:
    """Return a page as HTML, from a template, its data and its plots."""
    plotly, script = _plotly_js(), _page_js()
    page = _template(template).render(
        **context,
        figures={name: figure["title"] for name, figure in figures.items()},
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
        plotly=plotly,
        script=script,
        policy=_content_security_policy([plotly, script]),
        data=_json_for_script({"figures": figures, "candidates": legend}),
    )
    return str(page)


def _template(name: str) -> Any:
    try:
        import jinja2
    except ModuleNotFoundError:
        raise _missing_package("jinja2") from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    environment.filters["longest_part"] = longest_part
    return environment.get_template(name)


def breakable(text: str) -> Any:
    """Return text whose long words break over several lines between their parts, and never inside a part.

    A part such as `parameter_server:` stays on one line if it fits; otherwise it breaks between its own words.
    """
    from markupsafe import Markup, escape

    found = Markup("")
    for word in re.split(r"(\s+)", text):
        if len(word) <= SHORT_WORD or not re.search(r"[^\W\d_]", word):
            found += escape(word)
            continue
        for part in PARTS_OF_NAME.split(word):
            found += Markup('<span class="part-of-name">{}</span>').format(
                Markup("<wbr>").join(escape(own) for own in WORDS_OF_PART.split(part))
            )
    return found


def longest_part(text: str) -> int:
    """Return the number of characters of the longest part that `breakable` keeps together."""
    return max([len(part) for word in text.split() for part in PARTS_OF_NAME.split(word)], default=0)


@lru_cache(maxsize=1)
def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise _missing_package("plotly") from None
    return str(get_plotlyjs()).strip()


def _missing_package(package: str) -> PacelineError:
    hint = f"pip install {package}, then run `paceline report FOLDER`: the records are complete"
    return PacelineError(f"the page needs {package}, which is not installed.", hint=hint)


def _page_js() -> str:
    return "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)


def _content_security_policy(scripts: list[str]) -> str:
    """Return a policy that lets the browser run these scripts, identified by their hashes, and fetch nothing.

    Inline styles are allowed since plotly writes them, generated images since plots are saved as images.
    """
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _json_for_script(content: Any) -> str:
    """Return JSON that cannot close the script element it is in, whatever strings it contains."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


def split_headline(sentence: str) -> tuple[str, str]:
    """Split a sentence at its first colon into a headline ("Pick ddp") and the rest.

    The rest is empty where there is no colon, or where the headline would be too long.
    """
    claim, colon, reasons = sentence.partition(": ")
    if not colon or len(claim) > LONGEST_HEADLINE:
        return sentence.removesuffix("."), ""
    return claim, reasons


def provenance_context(record_set: RecordSet) -> dict[str, Any]:
    """Return the provenance of the records for the template: settings, machines, commands and folders."""
    return {
        "settings": _settings(record_set.config),
        "machines": [_machine(provenance) for provenance in _distinct_machines(record_set.provenances)],
        "commands": list(dict.fromkeys(_repeatable(p.command) for p in record_set.provenances if p.command)),
        "sources": record_set.sources,
    }


def workload_name(record_set: RecordSet) -> str:
    """Return the name of the workload, with its data set where it is known."""
    names = {entry.run.topology.workload for entry in record_set.runs}
    if len(names) == 1:
        return names.pop()
    workload, data = record_set.config.get("workload"), record_set.config.get("data")
    if workload is None:
        return "several workloads"
    return str(workload) if ":" in workload or data is None else f"{workload} on {data}"


def format_date(text: str | None) -> str | None:
    """Format an ISO date and time; return other text unchanged."""
    try:
        when = datetime.strptime(text or "", "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return text
    return f"{when.day} {when:%B %Y, %H:%M} {'UTC' if not when.utcoffset() else when.strftime('%z')}"


def _settings(config: Settings) -> list[tuple[str, str, bool]]:
    """Return name, value and whether it differs from the default, for each setting; those that differ come first."""
    defaults = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    known = [
        (key, _format_setting(value), key not in defaults or value != defaults[key]) for key, value in config.items()
    ]
    return sorted(known, key=lambda setting: not setting[2])


def _format_setting(value: Any) -> str:
    if value in (None, "", []):
        return "default"
    if isinstance(value, list):
        return shlex.join(map(str, value))
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _repeatable(command: str) -> str:
    """Return a command without `--out`, since that folder now contains its records."""
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


def _distinct_machines(provenances: list[Provenance]) -> list[Provenance]:
    """Return one provenance per machine and set of versions."""
    by_identity = {
        msgspec.json.encode(msgspec.structs.replace(p, time="", command=""), order="sorted"): p
        for p in reversed(provenances)
    }
    return list(reversed(by_identity.values()))


def _machine(provenance: Provenance) -> list[tuple[str, str]]:
    """Return a provenance as pairs of name and value."""
    versions = [f"{name} {version}" for name, version in provenance.versions.items() if version]
    cores = provenance.cpu_count
    facts = {
        "host": provenance.host,
        "processor": provenance.cpu and f"{provenance.cpu}, {plural(cores or 1, 'core')}",
        "memory": provenance.memory_bytes and size(provenance.memory_bytes),
        "system": provenance.system,
        "versions": ", ".join([f"Python {provenance.python}", *versions]),
        "commit": provenance.commit,
        "measured": format_date(provenance.time),
    }
    return [(name, str(value)) for name, value in facts.items() if value]
