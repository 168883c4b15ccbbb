"""Signatures of messages: nothing fits but the same content, under the same name, with the same key."""

from __future__ import annotations

import pytest

from paceline.signing import DIGEST_BYTES, JOB_KEY_VARIABLE, Signer, new_nonce


def test_a_signed_message_is_verified() -> None:
    signer = Signer(b"key")
    for content in (b"", b"{}", bytes(range(256)) * 5000):
        assert signer.verify("job-1", signer.sign("job-1", content)) == content


@pytest.mark.parametrize("position", [0, 31, 32, -1])
def test_a_changed_bit_is_noticed(position: int) -> None:
    message = bytearray(Signer(b"key").sign("job-1", b"content"))
    message[position] ^= 1
    assert Signer(b"key").verify("job-1", bytes(message)) is None


@pytest.mark.parametrize("message", [b"", b"short", b"x" * 32, b"x" * 33])
def test_garbage_is_not_verified(message: bytes) -> None:
    assert Signer(b"key").verify("job-1", message) is None


def test_a_message_fits_one_name_and_one_key() -> None:
    message = Signer(b"key").sign("job-1", b"content")
    assert Signer(b"key").verify("job-2", message) is None
    assert Signer(b"other").verify("job-1", message) is None
    # Names and contents are separated by their lengths.
    assert Signer(b"key").verify("job-", Signer(b"key").sign("job-1", b"0")[:32] + b"10") is None


def test_keys_of_launches_and_jobs_differ() -> None:
    token = Signer(b"token")
    signers = [
        token,
        token.derive("launch", "a", "b"),
        token.derive("launch", "ab"),
        token.derive("launch", "b", "a"),
        token.derive("job", "a", "b"),
        token.derive("launch", "a", "b").derive("job", "1"),
        token.derive("launch", "a", "b").derive("job", "2"),
    ]
    messages = [signer.sign("key", b"content") for signer in signers]
    assert len(set(messages)) == len(signers)
    assert token.derive("launch", "a", "b").verify("key", messages[1]) == b"content"


def test_a_signature_is_never_the_key_for_a_purpose() -> None:
    """Whoever reads a message reads its signature, too."""
    token = Signer(b"token")
    for purpose, parts in (("job", ["1"]), ("hello", ["a nonce"]), ("launch", ["a", "b"]), ("watchdog", [])):
        content = b"".join(part.encode() for part in parts)
        leaked = Signer(token.sign(purpose, content)[:DIGEST_BYTES])
        assert leaked.sign("key", b"content") != token.derive(purpose, *parts).sign("key", b"content")


def test_a_rank_takes_the_key_out_of_its_environment() -> None:
    signer = Signer.random()
    environment = signer.to_environment() | {"PATH": "/bin"}
    taken = Signer.take_from(environment)
    assert environment == {"PATH": "/bin"}
    assert taken is not None
    assert taken.verify("key", signer.sign("key", b"content")) == b"content"
    assert Signer.take_from(environment) is None


def test_a_key_is_not_printed() -> None:
    assert "secret" not in repr(Signer(b"secret"))
    assert Signer(b"secret").to_environment()[JOB_KEY_VARIABLE] not in repr(Signer(b"secret"))


def test_nonces_differ() -> None:
    assert len({new_nonce() for _ in range(100)}) == 100
