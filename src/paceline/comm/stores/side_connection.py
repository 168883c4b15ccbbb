"""Further connections to a store, apart from those of process groups: a call that waits blocks its connection."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from paceline.comm.stores.signed import SignedStore
from paceline.errors import UsageError
from paceline.signing import Signer

CONNECT = timedelta(seconds=30)


def connect(address: str, port: int) -> Store:
    """Return the store at an address, over a new connection."""
    return TCPStore(address, port, is_master=False, timeout=CONNECT, wait_for_workers=False)


def store_of_world() -> TCPStore | None:
    """Return the store of the default process group; None if it is not reached by TCP."""
    store = _without_prefix(distributed_c10d._get_default_store())
    if isinstance(store, SignedStore):
        store = _without_prefix(store.inner)
    return store if isinstance(store, TCPStore) else None


def signer_of_world() -> Signer | None:
    """Return the signer of the store of the default process group; None if its values are not signed."""
    store = _without_prefix(distributed_c10d._get_default_store())
    return store.signer if isinstance(store, SignedStore) else None


def _without_prefix(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def connect_to_store_of_world() -> Store:
    """Return the store of the default process group, over a new connection."""
    store = store_of_world()
    if store is None:
        raise UsageError(
            "collectives can only be checked if the process group was initialised with a TCP store.",
            hint="let torchrun or paceline start the ranks, or call init_process_group with env:// or tcp://",
        )
    return connect(store.host, store.port)
