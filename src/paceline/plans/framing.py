"""What Gloo adds to the bytes that it carries: headers and notices, by message. Measured at sockets, exact to the byte.

Every message between two ranks is three pieces of 48 bytes beside the data: the sender gives notice that it would like
to send, the receiver that it would like to receive, and the data follow a header of the same size. So a message costs
its sender 96 bytes, and its receiver 48 in the other direction. Large tensors hardly notice; in an all-reduce of 400
bytes on 4 ranks, a rank sends 600 bytes of data and 1,728 of these.
"""

from __future__ import annotations

from dataclasses import dataclass

HEADER_BYTES = 48
"""Six whole numbers of eight bytes: length, kind, tag and places."""
TO_SEND_BYTES = 2 * HEADER_BYTES
"""What a sender adds to a message: its notice, and the header before the data."""
TO_RECEIVE_BYTES = HEADER_BYTES
"""What a receiver sends back for it: that it is ready."""
LARGEST_SEGMENT_BYTES = 2**20
"""An all-reduce sends no message that is larger."""


@dataclass(frozen=True)
class Cut:
    """A tensor as a ring cuts it: into equal segments of whole items, as many for every rank. Each is a message.

    Gloo has at least two segments a rank: one is reduced while the other is on the wire. The last ones may be shorter;
    what would be empty is not sent.
    """

    bytes: int
    segment_bytes: int
    segments_per_rank: int

    @classmethod
    def evenly(cls, items: int, item_bytes: int, ranks: int) -> Cut:
        """As all_reduce does: into as few segments as there can be, all of the same size."""
        segments = -(-max(-(-items * item_bytes // _largest(item_bytes)), 2 * ranks) // ranks) * ranks
        return cls(items * item_bytes, -(-items // segments) * item_bytes, segments // ranks)

    @classmethod
    def by_limit(cls, items: int, item_bytes: int, ranks: int) -> Cut:
        """As reduce does: into segments as large as there can be."""
        size = items * item_bytes
        each = min(-(-items // (2 * ranks)) * item_bytes, _largest(item_bytes)) or item_bytes
        return cls(size, each, -(-max(-(-size // each), 2 * ranks) // ranks))

    def chunk(self, rank: int) -> tuple[int, int]:
        """The bytes and the messages of one rank's segments."""
        return self.of(rank * self.segments_per_rank, self.segments_per_rank)

    def of(self, first: int, count: int) -> tuple[int, int]:
        """The same of some segments that follow each other."""
        size = min(max(0, self.bytes - first * self.segment_bytes), count * self.segment_bytes)
        return size, -(-size // self.segment_bytes) if size else 0


def _largest(item_bytes: int) -> int:
    return item_bytes * max(1, LARGEST_SEGMENT_BYTES // item_bytes)
