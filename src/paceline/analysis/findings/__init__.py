"""What an examination means: what is fine, what to know, what to mend, each with its number and its fix."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.analysis.findings.finding import Finding
from paceline.analysis.findings.link import link_findings
from paceline.analysis.findings.machine import machine_findings
from paceline.records.examination import Examination

__all__ = ["Finding", "findings", "problems"]


def findings(examination: Examination) -> list[Finding]:
    """All of them, in the order of the checks."""
    return [*machine_findings(examination), *link_findings(examination)]


def problems(found: Sequence[Finding]) -> list[Finding]:
    """Those that have to be mended."""
    return [finding for finding in found if finding.level == "problem"]
