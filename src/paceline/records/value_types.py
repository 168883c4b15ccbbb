"""Types of the numbers in a record, with the bounds that the decoder checks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_TIME_S = 1e9
"""Upper limit of times in a record, in seconds since its start: 30 years."""
MAX_COUNT = (1 << 63) - 1
"""Upper limit of whole numbers: a larger one cannot be converted to every type that readers use."""

WholeNumber = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=-MAX_TIME_S, lt=MAX_TIME_S)]
"""A time, or a difference of times, which may be negative."""
PositiveSeconds = Annotated[float, Meta(gt=0, lt=MAX_TIME_S)]
