"""What a run leaves on disk, its schema, and how to write and read it. Free of torch: records travel to a laptop.

`docs/records.md` documents the schema for readers in any language.
"""

from paceline.records.provenance import provenance
from paceline.records.reader import RunRecord, Steps, read_run
from paceline.records.schema import SCHEMA_VERSION, StepRow
from paceline.records.writer import EventWriter, RunFolder, StepWriter

__all__ = [
    "SCHEMA_VERSION",
    "EventWriter",
    "RunFolder",
    "RunRecord",
    "StepRow",
    "StepWriter",
    "Steps",
    "provenance",
    "read_run",
]
