"""Token of a launch: where it comes from, and which files are refused."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.config import LaunchConfig
from paceline.errors import LaunchError, UsageError
from paceline.launch.channel import token
from paceline.launch.channel.token import TokenSource, check_token, create_token_file, new_token, read_token_file
from paceline.launch.launcher_process import LauncherProcess

OTHERS = LauncherProcess(number=0, launchers=2, master="198.18.0.1:29500")
FOLLOWER = LauncherProcess(number=1, launchers=2, node=1, master="198.18.0.1:29500")


def source(
    launcher: LauncherProcess = OTHERS, file: Path | None = None, notes: list[str] | None = None, **variables: str
) -> TokenSource:
    launch = LaunchConfig(hosts=2, token_file=None if file is None else str(file))
    return TokenSource(launcher, launch, 0.3, [].append if notes is None else notes.append, variables)


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in place of /tmp."""
    monkeypatch.setattr(token, "_FOLDER", tmp_path)
    return tmp_path / f"paceline-{os.geteuid()}"


def test_the_variable_is_used_and_removed() -> None:
    given = new_token()
    variables = {"PACELINE_TOKEN": f" {given}\n", "PATH": "/bin"}
    found = TokenSource(OTHERS, LaunchConfig(), 1.0, pytest.fail, variables)
    assert found.find() == given
    assert variables == {"PATH": "/bin"}, "ranks do not inherit it"


def test_several_hosts_without_a_token_have_none() -> None:
    assert source().find() is None
    torchrun = LauncherProcess(number=0, launchers=4, local_size=2, ranks=1, started_by="torchrun")
    assert source(torchrun, MASTER_PORT="29500").find() is None


def test_host_0_creates_a_file_that_only_the_user_can_read(tmp_path: Path) -> None:
    file, notes = tmp_path / "token", list[str]()
    found = source(file=file, notes=notes).find()
    assert found is not None
    assert len(found) == 64
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert notes == [f"created the token file {file}; other hosts need a copy of it, unless they share this disk"]
    assert source(FOLLOWER, file, notes).find() == found
    assert source(file=file, notes=notes).find() == found
    assert len(notes) == 1
    assert list(tmp_path.iterdir()) == [file]


def test_a_follower_waits_for_the_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(LaunchError, match=r"there was no token file .* on host 1 within 0.3 s") as refused:
        source(FOLLOWER, file)
    assert refused.value.hint is not None
    assert "scp -p" in refused.value.hint
    later = threading.Timer(0.1, create_token_file, [file])
    later.start()
    assert source(FOLLOWER, file).find() == read_token_file(file)
    later.join()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o666, 0o610])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "to ken"
    create_token_file(file)
    file.chmod(mode)
    with pytest.raises(UsageError, match=f"has mode {mode:04o}, so other users can read or write it") as refused:
        source(file=file)
    assert refused.value.hint is not None
    assert refused.value.hint.startswith(f"run `chmod 600 '{file}'`")


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    create_token_file(tmp_path / "token")
    (tmp_path / "link").symlink_to("token")
    (tmp_path / "dangling").symlink_to("nothing")
    for name in ("link", "dangling"):
        for launcher in (OTHERS, FOLLOWER):
            with pytest.raises(UsageError, match="it is a symbolic link"):
                source(launcher, tmp_path / name)
    assert not (tmp_path / "nothing").exists()


def test_what_is_not_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UsageError, match="is not a regular file"):
            source(file=path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    create_token_file(file)
    os.chown(file, 12345, 12345)
    with pytest.raises(UsageError, match="belongs to another user"):
        source(file=file)


@pytest.mark.parametrize("text", ["", "\n", "short", "x" * 31, "x" * 5000])
def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(text)
    with pytest.raises(UsageError, match="it must have 32 to 4096") as refused:
        source(file=file)
    assert refused.value.hint == "make a token with `openssl rand -hex 32`"
    with pytest.raises(UsageError, match="PACELINE_TOKEN has a token of"):
        check_token(text, "PACELINE_TOKEN")


@pytest.mark.parametrize("master", ["127.0.0.1:4000", "localhost:4000", "[::1]:4000"])
def test_processes_on_one_host_share_a_token_by_themselves(private: Path, master: str) -> None:
    launchers = [LauncherProcess(number=number, launchers=8, master=master) for number in range(8)]
    with ThreadPoolExecutor() as processes:
        sources = list(processes.map(source, launchers))
        found = set(processes.map(TokenSource.find, sources))
    assert len(found) == 1
    assert found != {None}
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    sources[1].forget()
    assert len(list(private.iterdir())) == 1
    sources[0].forget()
    assert list(private.iterdir()) == []


def test_tokens_that_killed_launches_left_are_removed(private: Path) -> None:
    launcher = LauncherProcess(launchers=2, master="127.0.0.1:4000")
    source(launcher).find()
    (left,) = private.iterdir()
    old = private / "token-of-yesterday"
    left.rename(old)
    source(launcher).find()
    assert old.exists()
    os.utime(old, (0, 0))
    source(launcher).find()
    assert list(private.iterdir()) == [left]


def test_torchrun_on_one_host_needs_no_token(private: Path) -> None:
    ranks = [
        LauncherProcess(number=number, launchers=2, local_size=2, ranks=1, started_by="torchrun") for number in (0, 1)
    ]
    tokens = [source(rank, MASTER_PORT="29500").find() for rank in ranks]
    assert tokens[0] == tokens[1] is not None
    assert source(ranks[0], MASTER_PORT="29501").find() not in tokens
    assert len(list(private.iterdir())) == 2


@pytest.mark.parametrize("squat", ["file", "link", "open"])
def test_a_folder_of_somebody_else_is_refused(private: Path, squat: str) -> None:
    if squat == "file":
        private.touch()
    elif squat == "link":
        (private.parent / "elsewhere").mkdir(mode=0o700)
        private.symlink_to("elsewhere")
    else:
        private.mkdir()
        private.chmod(0o755)
    with pytest.raises(LaunchError, match="is not a folder of this user alone"):
        source(LauncherProcess(launchers=2, master="127.0.0.1:4000")).find()
