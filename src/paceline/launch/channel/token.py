"""Token of a launch: the secret that its processes share, and by which they recognise each other. Free of torch.

    --token-file FILE    a file that only the user can read, on every host; host 0 creates it if it is missing
    PACELINE_TOKEN       the environment, for torchrun and srun; emulated hosts and `paceline submit` set it
    neither              processes on one host share a file under /tmp that only the user can read

The token is never an argument of a command, is not sent, and is removed from the environment before ranks start.
"""

from __future__ import annotations

import os
import secrets
import shlex
import stat
import tempfile
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from paceline.comm.network import is_loopback
from paceline.config import LaunchConfig
from paceline.errors import LaunchError, UsageError
from paceline.formatting import short_seconds
from paceline.launch.launcher_process import LauncherProcess, Notify
from paceline.measure.host import network_id
from paceline.signing import TOKEN_VARIABLE

TOKEN_BYTES = 32
LEAST_CHARACTERS, MOST_BYTES = 32, 4096
"""Length of a token that a user makes: short ones can be guessed."""
NEW_TOKEN_HINT = "make a token with `openssl rand -hex 32`"
NO_TOKEN = (
    "warning: this launch has no token, so any program that can connect to {endpoint} can take part in it; give all "
    "hosts the same --token-file, or set PACELINE_TOKEN"
)
POLL_S = 0.1
STALE_S = 86_400.0
"""Age of a token on one host after which no process waits for the others of its launch any more."""
NOTIFY_AFTER_S = 2.0
_FOLDER = Path("/tmp")
"""Parent of the user's folder of tokens. Not TMPDIR, which may differ between processes on one host."""


def new_token() -> str:
    """Return a new random token."""
    return secrets.token_hex(TOKEN_BYTES)


@dataclass
class TokenSource:
    """Source of the token of this launch, which is read once."""

    launcher: LauncherProcess
    launch: LaunchConfig
    timeout_s: float
    notify: Notify
    environment: MutableMapping[str, str] = field(default_factory=lambda: os.environ)
    """Environment of this process. The variable is removed from it, because ranks inherit it."""
    _found: list[str | None] = field(default_factory=list)
    _own_file: Path | None = None

    def __post_init__(self) -> None:
        given = self.environment.pop(TOKEN_VARIABLE, "")
        if self.launch.token_file is not None:
            self._found.append(_from_file(Path(self.launch.token_file), self.launcher, self.timeout_s, self.notify))
        elif given:
            self._found.append(check_token(given, TOKEN_VARIABLE))

    def find(self) -> str | None:
        """Return the token; None if there is none."""
        if not self._found:
            self._found.append(self._on_this_host())
        return self._found[0]

    def forget(self) -> None:
        """Remove the token that processes on this host share; called by the leader when all have read it."""
        if self._own_file is not None and self.launcher.is_leader:
            self._own_file.unlink(missing_ok=True)

    def _on_this_host(self) -> str | None:
        port = _port_on_this_host(self.launcher, self.environment)
        if port is None:
            return None
        self._own_file = _file_on_this_host(port)
        create_token_file(self._own_file)
        return read_token_file(self._own_file)


def read_token_file(file: Path) -> str:
    """Return the token in a file; raise `UsageError` if others can read or replace it."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        is_link = file.is_symlink()
        raise UsageError(
            f"the token file {file} cannot be read: {'it is a symbolic link' if is_link else error.strerror}.",
            hint="name the file itself" if is_link else "name a file that you own, with mode 0600",
        ) from None
    try:
        _check_private(file, os.fstat(descriptor))
        content = os.read(descriptor, MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    return check_token(content.decode(errors="replace"), f"the token file {file}")


def _check_private(file: Path, found: os.stat_result) -> None:
    """Raise `UsageError` if a token file is not a regular file of this user alone."""
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"the token file {file} is not a regular file.", hint="name a file that you own")
    if found.st_uid != os.geteuid():
        raise UsageError(
            f"the token file {file} belongs to another user.", hint="copy it to a file of your own, with mode 0600"
        )
    if mode & 0o077:
        raise UsageError(
            f"the token file {file} has mode {mode:04o}, so other users can read or write it.",
            hint=f"run `chmod 600 {shlex.quote(str(file))}`, and replace the token if others may have read it",
        )


def check_token(text: str, source: str) -> str:
    """Return a token without the white space around it; raise `UsageError` if it is too short or too long."""
    token = text.strip()
    if not LEAST_CHARACTERS <= len(token) <= MOST_BYTES:
        raise UsageError(
            f"{source} has a token of {len(token)} characters; it must have {LEAST_CHARACTERS} to {MOST_BYTES}.",
            hint=NEW_TOKEN_HINT,
        )
    return token


def create_token_file(file: Path) -> bool:
    """Create a file with a new token, which only this user can read; return False if it exists already.

    It appears complete: another process never reads half of it.
    """
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, prefix=".paceline-", delete=False
        ) as temporary:  # Mode 0600.
            temporary.write(f"{new_token()}\n")
        try:
            os.link(temporary.name, file)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary.name)  # noqa: PTH108
    except OSError as error:
        raise UsageError(
            f"the token file {file} cannot be created: {error.strerror}.", hint="name another file with --token-file"
        ) from None
    return True


def _from_file(file: Path, launcher: LauncherProcess, timeout_s: float, notify: Notify) -> str:
    """Return the token in the file of `--token-file`. Host 0 creates it; others wait for it on a shared disk."""
    if launcher.is_leader:
        if not os.path.lexists(file) and create_token_file(file):
            copied = "" if launcher.launchers == 1 else "; other hosts need a copy of it, unless they share this disk"
            notify(f"created the token file {file}{copied}")
        return read_token_file(file)
    start_s, notified = time.monotonic(), False
    while not os.path.lexists(file):
        waited_s = time.monotonic() - start_s
        if waited_s > timeout_s:
            raise LaunchError(
                f"there was no token file {file} on host {launcher.number} within {short_seconds(timeout_s)}.",
                hint=f"copy it from host 0 with its mode: `scp -p HOST0:FILE {shlex.quote(str(file))}`",
            )
        if waited_s > NOTIFY_AFTER_S and not notified:
            notify(f"waiting for the token file {file}: host 0 creates it; copy it here if the hosts share no disk …")
            notified = True
        time.sleep(POLL_S)
    return read_token_file(file)


def _port_on_this_host(launcher: LauncherProcess, environment: Mapping[str, str]) -> str | None:
    """Return the port of the control store if all launchers are on this host; None if they may be on several."""
    if launcher.started_by == "torchrun":
        return environment.get("MASTER_PORT", "") if launcher.hosts == 1 else None
    name, _, port = (launcher.master or "").rpartition(":")
    return port if name == "localhost" or is_loopback(name.strip("[]")) else None


def _file_on_this_host(port: str) -> Path:
    """Return the token file of a launch on this host, named by its network and port, in a folder of the user alone."""
    folder = _FOLDER / f"paceline-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise LaunchError(
            f"{folder} is not a folder of this user alone, and cannot hold a token.",
            hint="remove it or have its owner do so; or set PACELINE_TOKEN for all processes of the launch",
        )
    for left in folder.glob("token-*"):  # By launches that were killed.
        with suppress(FileNotFoundError):
            if left.stat().st_mtime < time.time() - STALE_S:
                left.unlink()
    return folder / f"token-{sha256(f'{network_id()} {port}'.encode()).hexdigest()[:16]}"
