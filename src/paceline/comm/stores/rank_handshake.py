"""Handshake of ranks that share a token but no launcher of Paceline's, as under torchrun.

The token may serve for many launches, so nonces make the key that is used once, as in the handshake of launchers:

    rank 0       challenge    its nonce
    other rank   hello        its nonce, signed for the challenge
    rank 0       nonces       those of all ranks, signed for the challenge

A rank accepts the nonces that contain its own. Ranks that a launcher of Paceline's starts get a key for their job.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.comm.stores.signed import SignedStore
from paceline.formatting import short_seconds
from paceline.signing import Signer, new_nonce

POLL_S = 0.02
PREFIX = "paceline-ranks"
FoundT = TypeVar("FoundT")


def shake_hands(store: Store, token: Signer, rank: int, size: int, timeout_s: float) -> Signer:
    """Return the signer of this launch once all ranks have proven that they know the token.

    Raise `RuntimeError` if they have not within the time limit.
    """
    signer = token.derive("ranks", str(size))
    nonces = (_collect if rank == 0 else _answer)(PrefixStore(PREFIX, store), signer, rank, size, timeout_s)
    return signer.derive("launch", *nonces)


def _collect(store: Store, signer: Signer, rank: int, size: int, timeout_s: float) -> list[str]:
    """Return the nonces of all ranks, on rank 0, and post them."""
    challenge = new_nonce()
    open_store, hellos = SignedStore(store, signer), SignedStore(store, signer.derive("hello", challenge))

    def found() -> list[str] | None:
        if open_store.find("challenge") != challenge.encode():  # At first, and if another program overwrote it.
            open_store.set("challenge", challenge)
        answers = [hellos.find(f"hello-{other}") for other in range(size) if other != rank]
        return None if None in answers else [challenge, *[answer.decode() for answer in answers if answer]]

    nonces = _poll(found, timeout_s, "the other ranks to prove that they know PACELINE_TOKEN")
    SignedStore(store, signer.derive("nonces", challenge)).set("nonces", json.dumps(nonces))
    return nonces


def _answer(store: Store, signer: Signer, rank: int, size: int, timeout_s: float) -> list[str]:
    """Return the nonces of all ranks, on a rank other than 0."""
    nonce = new_nonce()
    open_store = SignedStore(store, signer)

    def found() -> list[str] | None:
        challenge = (open_store.find("challenge") or b"").decode()
        if not challenge:
            return None
        posted = SignedStore(store, signer.derive("nonces", challenge)).find("nonces")
        nonces: list[str] = [] if posted is None else json.loads(posted)
        if len(nonces) == size and nonces[rank] == nonce:
            return nonces
        SignedStore(store, signer.derive("hello", challenge)).set(f"hello-{rank}", nonce)
        return None

    return _poll(found, timeout_s, "rank 0 to prove that it knows PACELINE_TOKEN")


def _poll(found: Callable[[], FoundT | None], timeout_s: float, what: str) -> FoundT:
    deadline = time.monotonic() + timeout_s
    while (value := found()) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"Timed out waiting {short_seconds(timeout_s)} for {what}")
        time.sleep(POLL_S)
    return value
