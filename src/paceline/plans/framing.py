"""What Gloo adds to the bytes that it carries: headers and notices, by message. Measured at sockets, exact to the byte.

Every message between two ranks is three pieces of 48 bytes beside the data: the sender gives notice that it would like
to send, the receiver that it would like to receive, and the data follow a header of the same size. So a message costs
its sender 96 bytes, and its receiver 48 in the other direction. Large tensors hardly notice; in an all-reduce of 400
bytes on 4 ranks, a rank sends 600 bytes of data and 1,728 of these.
"""

from __future__ import annotations

import itertools

HEADER_BYTES = 48
"""Six whole numbers of eight bytes: length, kind, tag and places."""
TO_SEND_BYTES = 2 * HEADER_BYTES
"""What a sender adds to a message: its notice, and the header before the data."""
TO_RECEIVE_BYTES = HEADER_BYTES
"""What a receiver sends back for it: that it is ready."""
LARGEST_SEGMENT_BYTES = 2**20
"""An all-reduce sends no message that is larger."""


def ring_segments(items: int, item_bytes: int, ranks: int) -> list[list[int]]:
    """The messages that each of a ring's chunks is sent in, in bytes; one chunk per rank.

    Gloo cuts a tensor into equal segments of whole items, as many for every rank, at least two: one is reduced while
    the other is on the wire. The last ones may be shorter; what would be empty is not sent.
    """
    size = items * item_bytes
    largest = item_bytes * max(1, LARGEST_SEGMENT_BYTES // item_bytes)
    per_rank = -(-max(-(-size // largest), 2 * ranks) // ranks)
    each = -(-items // (per_rank * ranks)) * item_bytes
    cuts = [min(number * each, size) for number in range(per_rank * ranks + 1)]
    segments = [after - before for before, after in itertools.pairwise(cuts)]
    return [
        [segment for segment in segments[rank * per_rank : (rank + 1) * per_rank] if segment] for rank in range(ranks)
    ]
