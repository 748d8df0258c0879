"""Test that files and directories which other users can change are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helmsman._process.safe_files import (
    is_own_directory,
    open_directory,
    open_log,
    open_regular,
    owner,
    private_directory,
    remove_tree,
)
from helmsman.api.errors import UntrustedPathError

OTHER = 65_534
RUN_ID = "0123456789"
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user"),
]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory with the mode of /tmp."""
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o1777)
    return path


def give_away(path: Path) -> Path:
    """Give a path to another user."""
    os.chown(path, OTHER, OTHER, follow_symlinks=False)
    return path


def make_directory(path: Path, mode: int = 0o700) -> Path:
    """Create a directory with exactly this mode."""
    path.mkdir()
    path.chmod(mode)
    return path


def write(log: Path) -> None:
    """Append a line to a log."""
    with os.fdopen(open_log(log, RUN_ID), "w") as file:
        file.write("line\n")


def test_open_directory_creates_private_parents(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        with open_directory(tmp_path / "a" / "b", create=True) as folder:
            assert os.fstat(folder).st_ino == (tmp_path / "a" / "b").stat().st_ino
    finally:
        os.umask(previous)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b")} == {
        0o700
    }


def test_open_directory_missing_part(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match=f"{tmp_path}/a'"),
        open_directory(tmp_path / "a" / "b"),
    ):
        pass


def test_open_directory_own_links(shared: Path, tmp_path: Path) -> None:
    target = make_directory(tmp_path / "target")
    (shared / "absolute").symlink_to(target)
    (shared / "relative").symlink_to("../target")
    for name in ("absolute", "relative"):
        with open_directory(shared / name) as folder:
            assert os.fstat(folder).st_ino == target.stat().st_ino


def test_open_directory_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"), open_directory(tmp_path / "loop"):
        pass


@pytest.mark.parametrize("mode", [0o1777, 0o777])
def test_open_directory_foreign_link_in_shared_folder(tmp_path: Path, mode: int) -> None:
    public = make_directory(tmp_path / "public", mode)
    (public / "link").symlink_to(tmp_path)
    give_away(public / "link")
    with (
        pytest.raises(UntrustedPathError, match="it is a symbolic link of nobody"),
        open_directory(public / "link" / "x"),
    ):
        pass


def test_open_directory_foreign_in_sticky_folder(shared: Path) -> None:
    give_away(make_directory(shared / "logs", 0o777))
    with pytest.raises(UntrustedPathError) as caught, open_directory(shared / "logs"):
        pass
    assert caught.value.path == str(shared / "logs")
    assert caught.value.owner == owner(OTHER)


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_open_directory_foreign_volume(tmp_path: Path, mode: int) -> None:
    """Volumes of containers often belong to another user and are writable by everyone."""
    volume = give_away(make_directory(tmp_path / "volume", mode))
    give_away(make_directory(volume / "logs", mode))
    write(volume / "logs" / "new" / "a-0.log")
    write(volume / "logs" / "a-0.log")
    write(volume / "logs" / "a-0.log")
    assert (volume / "logs" / "a-0.log").read_text() == "line\nline\n"


def test_private_directory_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with (
        pytest.raises(UntrustedPathError, match="it is a file with mode"),
        private_directory(tmp_path, "mine"),
    ):
        pass


def test_open_log_appends_privately(tmp_path: Path) -> None:
    log = tmp_path / "a-0.log"
    write(log)
    write(log)
    assert log.read_text() == "line\nline\n"
    assert log.stat().st_mode & 0o777 == 0o600


def test_open_log_public_run_directory(tmp_path: Path) -> None:
    make_directory(tmp_path / RUN_ID, 0o777)
    with pytest.raises(UntrustedPathError, match="with mode 0777"):
        write(tmp_path / RUN_ID / "a-0.log")


def test_open_log_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a-0.log")
    with pytest.raises(UntrustedPathError, match="it is a special file"):
        write(tmp_path / "a-0.log")
    with pytest.raises(UntrustedPathError, match="it is a special file"):
        open_regular(tmp_path / "a-0.log")


def test_open_log_foreign_file_in_shared_folder(shared: Path) -> None:
    (shared / "a-0.log").touch()
    give_away(shared / "a-0.log")
    with pytest.raises(UntrustedPathError, match="it is a file with mode 0644 of nobody"):
        write(shared / "a-0.log")


def test_open_log_hard_link_in_shared_folder(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("unchanged")
    os.link(tmp_path / "precious", shared / "a-0.log")
    with pytest.raises(UntrustedPathError, match="expected a file without other hard links"):
        write(shared / "a-0.log")
    assert (tmp_path / "precious").read_text() == "unchanged"


def test_remove_tree_keeps_link_targets(tmp_path: Path) -> None:
    kept, tree = make_directory(tmp_path / "kept"), make_directory(tmp_path / "tree")
    (tree / "link").symlink_to(kept)
    (tmp_path / "link").symlink_to(kept)
    remove_tree(tree)
    assert not tree.exists()
    with pytest.raises(UntrustedPathError, match="it is a symbolic link"):
        remove_tree(tmp_path / "link")
    assert kept.exists()


def test_remove_tree_foreign(tmp_path: Path) -> None:
    tree = give_away(make_directory(tmp_path / "tree"))
    assert not is_own_directory(tree)
    with pytest.raises(UntrustedPathError, match="of nobody"):
        remove_tree(tree)
    assert tree.exists()
