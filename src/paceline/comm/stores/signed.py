"""Store whose values are signed: a value that another program wrote counts as missing.

Anyone who reaches torch's store can read, overwrite and delete its values; it has no credentials. Torch's own values,
such as the addresses at which Gloo's ranks listen, pass through this store too, because process groups accept a store
that is written in Python. Counters of `add` cannot be signed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.formatting import short_seconds
from paceline.signing import Signer

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05
"""Pauses between reads while waiting; each is twice as long as the one before."""
_ABSENT = secrets.token_hex(16)
"""Value that no key has."""


def read_now(store: Store, key: str) -> bytes | None:
    """Return the value of a key of a TCPStore, or None if it is missing.

    `get` would wait for a key that another program deletes at the wrong moment. Comparing the value with one that no
    key has changes nothing, and returns what is there.
    """
    value = bytes(store.compare_set(key, _ABSENT, _ABSENT))
    return None if value == _ABSENT.encode() else value


class SignedStore(Store):
    """A TCPStore whose values are signed. The owner must keep it: torch's C++ code does not keep Python objects."""

    def __init__(self, store: Store, signer: Signer, notify: Callable[[str], object] = lambda _: None) -> None:
        """`notify` is called once for each key under which a value with a wrong signature is found."""
        super().__init__()
        self.inner, self.signer, self._notify = store, signer, notify
        self._ignored: set[str] = set()
        self.set_timeout(store.timeout)  # type: ignore[attr-defined]

    def find(self, key: str) -> bytes | None:
        """Return the value of a key; None if it is missing or its signature is wrong."""
        message = read_now(self.inner, key)
        content = None if message is None else self.signer.verify(key, message)
        if message is not None and content is None and key not in self._ignored:
            self._ignored.add(key)
            self._notify(f"warning: {key!r} in the store of this job is not signed with the job's key, and is ignored")
        return content

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value, with its signature."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self.inner.set(key, self.signer.sign(key, content))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a value with a valid signature; return it."""
        self.wait([key])
        content = self.find(key)
        if content is None:  # Overwritten since.
            raise RuntimeError(f"another program overwrites {key!r} in the store of this job")
        return content

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values with valid signatures."""
        return all(self.find(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values with valid signatures; raise `RuntimeError` on time-out."""
        limit_s = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        deadline = time.monotonic() + limit_s
        missing, pause_s = list(keys), FIRST_PAUSE_S
        while missing := [key for key in missing if self.find(key) is None]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"Timed out waiting {short_seconds(limit_s)} for {', '.join(missing)}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is not signed; return the sum."""
        return int(self.inner.add(key, amount))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(self.inner.delete_key(key))

    deleteKey = delete_key  # The name by which torch's C++ code calls it.

    def clone(self) -> SignedStore:
        """Return this store, for another thread: no call blocks the connection."""
        return self

    def has_extended_api(self) -> bool:
        """Return False: torch then calls `set` and `get` for each of several keys."""
        return False
