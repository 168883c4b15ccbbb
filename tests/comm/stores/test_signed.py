"""Store whose values are signed, with a stranger who writes to the same store."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.comm.groups.collective_check import Call, CollectiveCheck
from paceline.comm.stores.rank_handshake import shake_hands
from paceline.comm.stores.signed import SignedStore, read_now
from paceline.comm.stores.stop_request import StopRequest, request_stop
from paceline.errors import RankError, is_peer_lost
from paceline.launch import rendezvous
from paceline.signing import Signer

LIMIT = timedelta(seconds=10)
KEY = Signer(b"key of the job")


@pytest.fixture
def port() -> int:
    """Port of a store that lives as long as the test."""
    listener = rendezvous.bind()
    number: int = listener.getsockname()[1]
    SERVERS.append(rendezvous.open_store("127.0.0.1", number, listener, LIMIT))
    return number


SERVERS: list[TCPStore] = []


def connect(port: int) -> TCPStore:
    return rendezvous.open_store("127.0.0.1", port, None, LIMIT)


def test_values_are_read_through_prefixes(port: int) -> None:
    mine, other = SignedStore(connect(port), KEY), SignedStore(connect(port), KEY)
    ranks: list[Store] = [PrefixStore("world-1", mine), PrefixStore("world-1", other)]
    assert not ranks[0].check(["address"])
    ranks[1].set("address", "198.18.0.1")
    assert ranks[0].check(["address"])
    assert ranks[0].get("address") == b"198.18.0.1"
    ranks[1].multi_set(["a", "b"], ["1", "2"])  # type: ignore[attr-defined]
    assert ranks[0].multi_get(["a", "b"]) == [b"1", b"2"]  # type: ignore[attr-defined]


def test_a_strangers_value_counts_as_missing_and_is_reported_once(port: int) -> None:
    reported: list[str] = []
    stranger, store = connect(port), SignedStore(connect(port), KEY, reported.append)
    stranger.set("address", "evil")
    assert [store.check(["address"]), store.check(["address"])] == [False, False]
    with pytest.raises(RuntimeError, match="Timed out waiting") as refused:
        store.wait(["address"], timedelta(seconds=0.05))
    assert is_peer_lost(refused.value)
    assert reported == ["warning: 'address' in the store of this job is not signed with the job's key, and is ignored"]
    SignedStore(connect(port), KEY).set("address", "mine")
    assert store.get("address") == b"mine"


def test_a_waiting_rank_goes_on_when_the_genuine_value_replaces_the_forged_one(port: int) -> None:
    store = SignedStore(connect(port), KEY)
    connect(port).set("address", "evil")
    genuine = threading.Timer(0.1, lambda: SignedStore(connect(port), KEY).set("address", "mine"))
    genuine.start()
    assert store.get("address") == b"mine"
    genuine.join()


def test_a_recorded_value_fits_neither_another_key_nor_another_job(port: int) -> None:
    stranger = connect(port)
    SignedStore(connect(port), KEY).set("world-1/rank-0", "mine")
    recorded = stranger.get("world-1/rank-0")
    stranger.set("world-1/rank-1", recorded)  # type: ignore[arg-type]
    assert not SignedStore(connect(port), KEY).check(["world-1/rank-1"])
    assert not SignedStore(connect(port), Signer(b"key of another job")).check(["world-1/rank-0"])


def test_reading_does_not_wait_for_a_key_that_was_deleted(port: int) -> None:
    store = connect(port)
    assert read_now(store, "nothing") is None
    assert not store.check(["nothing"]), "reading creates no key"
    store.set("something", "")
    assert read_now(store, "something") == b""


def test_a_stranger_cannot_stop_a_run(port: int) -> None:
    stranger = connect(port)
    signed = SignedStore(connect(port), KEY)
    rank = StopRequest(PrefixStore("paceline", PrefixStore("world-1", signed)))
    for key in ("stop-requested", "stop-step"):
        stranger.set(f"paceline-stop/{key}", "1")
    assert (rank.requested(), rank.announced()) == (False, None)
    launcher = SignedStore(connect(port), KEY)
    request_stop(launcher)
    rank.announce(7)
    assert (rank.requested(), rank.announced()) == (True, 7)


def test_records_of_calls_fit_one_check(port: int) -> None:
    """Groups of a later world have the names of an earlier one's: its calls would then differ from the recorded one."""
    stranger = connect(port)
    first, second = (CollectiveCheck(connect(port), number, KEY) for number in range(2))
    first.collective("group", 2, call("all_reduce"))
    recorded = stranger.get("paceline-check-0/group/0")
    stranger.set("paceline-check-1/group/0", recorded)  # type: ignore[arg-type]
    stranger.get("paceline-check-1/group/0")
    second.collective("group", 2, call("barrier"))
    with pytest.raises(RankError, match=r"rank 0 called barrier at a\.py:1, but rank 1 called all_reduce"):
        CollectiveCheck(connect(port), 1, KEY).collective("group", 2, call("all_reduce", rank=1))


def call(kind: str, rank: int = 0) -> Call:
    return Call(rank=rank, kind=kind, shapes=[], dtypes=[], detail="", place="a.py:1")


def all_ranks(port: int, *tokens: Signer, timeout_s: float = 5.0) -> list[Signer | Exception]:
    """Return the signers of ranks that shake hands, or the errors that refuse them."""

    def join(rank: int) -> Signer | Exception:
        try:
            return shake_hands(connect(port), tokens[rank], rank, len(tokens), timeout_s)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor() as ranks:
        return list(ranks.map(join, range(len(tokens))))


def test_ranks_with_the_same_token_get_a_new_key_each_time(port: int) -> None:
    signed = []
    for _ in range(2):
        signers = all_ranks(port, KEY, KEY, KEY)
        messages = {one.sign("key", b"content") for one in signers if isinstance(one, Signer)}
        assert len(messages) == 1, signers
        signed += messages
    assert signed[0] != signed[1], "recorded messages of the first launch, which are still there, do not fit"


def test_a_rank_without_the_token_is_not_accepted(port: int) -> None:
    for error in all_ranks(port, KEY, Signer(b"guessed"), timeout_s=0.3):
        assert isinstance(error, RuntimeError)
        assert "prove that" in str(error)
