"""Signatures of messages between the processes of a launch: HMAC-SHA256 with a key that no message contains.

    token ── handshake with nonces ──> key of a launch ── number of a job ──> key of a job

Every key is derived from the one before it, so that a message of another launch, or of another job, does not fit.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import MutableMapping
from typing import Self

DIGEST_BYTES = hashlib.sha256().digest_size
TOKEN_VARIABLE = "PACELINE_TOKEN"
"""Variable in which a user passes the token of a launch to its processes."""
JOB_KEY_VARIABLE = "PACELINE_JOB_KEY"
"""Variable in which a launcher passes the key of a job to its ranks."""

_MESSAGE, _KEY = b"m", b"k"
"""Uses of an HMAC: a signature, which everyone can read, must never be the key that is derived for a purpose."""


class Signer:
    """Signs messages with a key, and checks signatures."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…)"  # A key must not appear in a traceback or a log.

    @classmethod
    def random(cls) -> Self:
        """Return a signer with a new key."""
        return cls(secrets.token_bytes(DIGEST_BYTES))

    @classmethod
    def take_from(cls, environment: MutableMapping[str, str]) -> Self | None:
        """Return the signer of this rank's job and remove its key from the environment; None if there is no key."""
        text = environment.pop(JOB_KEY_VARIABLE, "")
        return cls(bytes.fromhex(text)) if text else None

    def to_environment(self) -> dict[str, str]:
        """Return the variable that passes this signer to ranks."""
        return {JOB_KEY_VARIABLE: self._key.hex()}

    def derive(self, purpose: str, *parts: str) -> Signer:
        """Return the signer for a purpose, with a key of its own."""
        return Signer(self._digest(_KEY, purpose, *(part.encode() for part in parts)))

    def sign(self, name: str, content: bytes) -> bytes:
        """Return a message with its signature, which covers the name under which it is posted."""
        return self._digest(_MESSAGE, name, content) + content

    def verify(self, name: str, message: bytes) -> bytes | None:
        """Return the content of a message that was signed under this name; None if the signature does not fit."""
        digest, content = message[:DIGEST_BYTES], message[DIGEST_BYTES:]
        return content if hmac.compare_digest(digest, self._digest(_MESSAGE, name, content)) else None

    def _digest(self, use: bytes, name: str, *parts: bytes) -> bytes:
        """Return the HMAC over a use and all parts, each after its length, so that no two lists of parts are alike."""
        own = hmac.new(self._key, use, digestmod=hashlib.sha256)
        for part in (name.encode(), *parts):
            own.update(len(part).to_bytes(8, "big"))
            own.update(part)
        return own.digest()


def new_nonce() -> str:
    """Return a random text that is used once."""
    return secrets.token_hex(16)


_job_signers: list[Signer] = []
"""Signer of the job that this process is a rank of, if a launcher has passed a key."""


def keep_job_key(signer: Signer | None) -> None:
    """Keep the signer of this rank's job, for `job_signer`."""
    _job_signers[:] = [] if signer is None else [signer]


def job_signer() -> Signer | None:
    """Return the signer of the job that this process is a rank of; None if it has no key."""
    return _job_signers[0] if _job_signers else None
