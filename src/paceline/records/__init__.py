"""Records on disk: schema, writer, reader. Free of torch, so that a laptop without torch can read records.

`docs/records.md` documents the schema for readers in any language.
"""

from paceline.records.description import RunDescription, Topology
from paceline.records.provenance import Provenance, provenance
from paceline.records.reader import RunRecord, Steps, read_run
from paceline.records.schema import SCHEMA_VERSION, StepRow
from paceline.records.summary import Summary
from paceline.records.writer import EventWriter, RunFolder, StepWriter

__all__ = [
    "SCHEMA_VERSION",
    "EventWriter",
    "Provenance",
    "RunDescription",
    "RunFolder",
    "RunRecord",
    "StepRow",
    "StepWriter",
    "Steps",
    "Summary",
    "Topology",
    "provenance",
    "read_run",
]
