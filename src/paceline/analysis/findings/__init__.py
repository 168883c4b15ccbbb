"""Findings of an examination: checks that passed, notes and problems, each with its measurement and its fix."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.analysis.findings.finding import Finding
from paceline.analysis.findings.link import link_findings
from paceline.analysis.findings.machine import machine_findings
from paceline.records.examination import Examination

__all__ = ["Finding", "findings", "problems"]


def findings(examination: Examination) -> list[Finding]:
    """Return all findings, in the order of the checks."""
    return [*machine_findings(examination), *link_findings(examination)]


def problems(found: Sequence[Finding]) -> list[Finding]:
    """Return the findings that must be fixed."""
    return [finding for finding in found if finding.level == "problem"]
