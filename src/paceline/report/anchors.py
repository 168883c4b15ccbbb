"""Where a number stands on the page: the ids that sentences link to.

| table | what its figures are called |
|---|---|
| `table` | the keys of `comparison_columns`: step_s, exposed, overlap, sent and so on |
| `split` | the keys of `split_columns`: compute_s, overlapped_s, exposed_s, other_s, data_s, stolen_s, wait_s |
| `bytes` | the keys of `bytes_columns`: gradients, buffers, total, lower_bound |
| `wire` | kind of operation and purpose, as all_reduce-gradients |

Whole sections have ids of their own: why, split, timeline, network, machine, resources, profile.
"""

from __future__ import annotations

from typing import Literal

from paceline.analysis.comparison import Comparison

Table = Literal["table", "split", "bytes", "wire"]


def anchor(comparison: Comparison, table: Table, contender: str, figure: str) -> str:
    """The id of a contender's figure in a table of the page; names may hold anything, so ids have their numbers."""
    number = [one.name for one in comparison.pool.contenders].index(contender)
    return f"{table}-{number + 1}-{figure}"
