"""Access to files and directories that protects against other users who may write nearby.

Three rules, each checked on a descriptor that stays open, so that nothing can be replaced in
between:

- Below a world-writable directory, symbolic links and existing files must belong to this user or
  root. So must directories, if the world-writable one has the sticky bit, as /tmp has. Without that
  bit, anyone may replace its directories, so their owners are not checked.
- Helmsman's own directories are real ones of this user with mode 0700.
- Files are regular ones, and no symbolic link in their place is ever followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from helmsman.api.errors import UntrustedPathError

_SEARCH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_LINKS = 40


@contextlib.contextmanager
def open_directory(path: str | Path, *, create: bool = False) -> Iterator[int]:
    """Open a directory that the user has named; yields a descriptor.

    Args:
        path: The directory.
        create: Create missing components with mode 0700.

    Raises:
        UntrustedPathError: A component could have been planted by another user.
        OSError: A component is missing or inaccessible.
    """
    pending = list(reversed(os.path.abspath(path).split("/")))
    at, num_links = "/", 0
    here = os.open("/", _SEARCH)
    try:
        while pending:
            name = pending.pop()
            if not name:
                continue
            whole = os.path.join(at, name)
            entry = _entry(name, here, whole, create)
            _require_not_planted(entry, os.fstat(here), whole)
            if stat.S_ISLNK(entry.st_mode):
                num_links += 1
                if num_links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                target = os.readlink(name, dir_fd=here)
                pending += reversed(target.split("/"))
                if not target.startswith("/"):
                    continue
                at, below = "/", os.open("/", _SEARCH)
            else:
                at, below = whole, _open_same(name, here, whole, entry, _SEARCH)
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)


@contextlib.contextmanager
def _naming(whole: str) -> Iterator[None]:
    """Give errors of the operating system the whole path instead of its last component."""
    try:
        yield
    except UntrustedPathError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, whole) from error


def _entry(name: str, folder: int, whole: str, create: bool) -> os.stat_result:
    with _naming(whole):
        try:
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            if not create:
                raise
        with contextlib.suppress(FileExistsError):  # created by another process meanwhile
            os.mkdir(name, 0o700, dir_fd=folder)
        return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _open_same(name: str, folder: int, whole: str, entry: os.stat_result, flags: int) -> int:
    """Open the directory that ``entry`` describes; rejects one that has replaced it since."""
    with _naming(whole):
        opened = os.open(name, flags, dir_fd=folder)
        if not os.path.samestat(os.fstat(opened), entry):
            os.close(opened)
            raise _untrusted(whole, entry, "a directory that is not replaced while it is opened")
    return opened


@contextlib.contextmanager
def private_directory(base: str | Path, *names: str, create: bool = True) -> Iterator[int]:
    """Open one of Helmsman's own directories; yields a descriptor that can be listed.

    Each of ``names`` must be a real directory of this user. One that others may read is changed to
    mode 0700. One that others may write to is rejected.

    Args:
        base: The directory above.
        *names: Components below ``base``.
        create: Create missing components with mode 0700.

    Raises:
        UntrustedPathError: A component could have been planted by another user.
        OSError: A component is missing or inaccessible.
    """
    with contextlib.ExitStack() as opened:
        here = opened.enter_context(open_directory(base, create=create))
        whole = os.path.abspath(base)
        for name in names:
            whole = os.path.join(whole, name)
            entry = _entry(name, here, whole, create)
            if (
                not stat.S_ISDIR(entry.st_mode)
                or entry.st_uid != os.geteuid()
                or entry.st_mode & 0o022
            ):
                raise _untrusted(
                    whole, entry, f"a directory of {owner(os.geteuid())} with mode 0700"
                )
            here = _open_same(name, here, whole, entry, _LIST)
            opened.callback(os.close, here)
            if entry.st_mode & 0o077:
                os.fchmod(here, 0o700)
        yield here


@contextlib.contextmanager
def log_directory(path: str | Path, run_id: str) -> Iterator[int]:
    """Open a run's log directory, which is created if missing; yields a descriptor.

    A directory named after the run is Helmsman's own and must be private.

    Raises:
        UntrustedPathError: A component could have been planted by another user.
        OSError: The directory cannot be created or opened.
    """
    whole = Path(os.path.abspath(path))
    is_own = whole.name == run_id
    with (
        private_directory(whole.parent, run_id)
        if is_own
        else open_directory(whole, create=True) as folder
    ):
        yield folder


def open_log(path: str | Path, run_id: str, *, mapped: bool = False) -> int:
    """Open or create a file of a run's log directory; returns a descriptor.

    Args:
        path: The file.
        run_id: The run.
        mapped: For a memory mapping instead of appending.

    Raises:
        UntrustedPathError: The file or a directory could have been planted by another user.
        OSError: It cannot be opened.
    """
    whole = os.path.abspath(path)
    directory, name = os.path.split(whole)
    flags = (os.O_RDWR if mapped else os.O_WRONLY | os.O_APPEND) | _FILE
    with log_directory(directory, run_id) as folder:
        try:
            with _naming(whole):
                fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        except FileExistsError:
            fd = _open_file(name, folder, whole, flags)
    os.set_blocking(fd, True)
    return fd


def open_regular(path: str | Path) -> int:
    """Open a regular file for reading; returns a descriptor.

    Raises:
        UntrustedPathError: It is not a regular file, or could have been planted.
        OSError: It cannot be opened.
    """
    directory, name = os.path.split(os.path.abspath(path))
    folder = os.open(directory, _SEARCH & ~os.O_NOFOLLOW)
    try:
        return _open_file(name, folder, os.path.join(directory, name), os.O_RDONLY | _FILE)
    finally:
        os.close(folder)


def read_own(
    name: str, folder: int, whole: str, most_bytes: int = sys.maxsize
) -> tuple[bytes, int]:
    """Read a file of this user in an open directory, at most ``most_bytes`` of it.

    Returns:
        The content, and a descriptor that the caller closes.

    Raises:
        UntrustedPathError: It is not a regular file of this user.
        OSError: It cannot be opened.
    """
    fd = _open_file(name, folder, whole, os.O_RDONLY | _FILE)
    entry = os.fstat(fd)
    if entry.st_uid != os.geteuid():
        os.close(fd)
        raise _untrusted(whole, entry, f"a file of {owner(os.geteuid())}")
    return os.pread(fd, min(entry.st_size, most_bytes), 0), fd


def _open_file(name: str, folder: int, whole: str, flags: int) -> int:
    entry = _entry(name, folder, whole, False)
    if stat.S_IFMT(entry.st_mode) in (
        stat.S_IFLNK,
        stat.S_IFIFO,
        stat.S_IFSOCK,
    ):
        # Opening these fails or blocks.
        raise _untrusted(whole, entry, "a regular file")
    with contextlib.ExitStack() as undo, _naming(whole):
        fd = os.open(name, flags, dir_fd=folder)
        undo.callback(os.close, fd)
        entry, directory = os.fstat(fd), os.fstat(folder)
        if not stat.S_ISREG(entry.st_mode):
            raise _untrusted(whole, entry, "a regular file")
        _require_not_planted(entry, directory, whole)
        if entry.st_nlink > 1 and directory.st_mode & stat.S_IWOTH:
            raise _untrusted(
                whole,
                entry,
                "a file without other hard links, as everyone may write to its directory",
            )
        undo.pop_all()
    return fd


def remove_tree(path: str | Path) -> None:
    """Remove a directory of this user with its content; symbolic links are not followed.

    Use it only for paths derived from a run's id, or created by this process.

    Raises:
        UntrustedPathError: It is not a directory of this user.
        OSError: It cannot be removed.
    """
    directory, name = os.path.split(os.path.abspath(path))
    with open_directory(directory) as folder:
        entry = _entry(name, folder, str(path), False)
        if not stat.S_ISDIR(entry.st_mode) or entry.st_uid != os.geteuid():
            raise _untrusted(str(path), entry, f"a directory of {owner(os.geteuid())}")
        shutil.rmtree(name, dir_fd=folder)


def is_own_directory(path: str | Path) -> bool:
    try:
        entry = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(entry.st_mode) and entry.st_uid == os.geteuid()


def owner(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _require_not_planted(entry: os.stat_result, directory: os.stat_result, whole: str) -> None:
    open_to_all = bool(directory.st_mode & stat.S_IWOTH)
    if stat.S_ISDIR(entry.st_mode):
        open_to_all = open_to_all and bool(directory.st_mode & stat.S_ISVTX)
    if open_to_all and entry.st_uid not in (0, os.geteuid()):
        kind = "directory" if stat.S_ISDIR(entry.st_mode) else "entry"
        raise _untrusted(
            whole, entry, f"a {kind} of {owner(os.geteuid())} or root where everyone may write"
        )


def _untrusted(path: str, entry: os.stat_result, expected: str) -> UntrustedPathError:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFREG: "a file", stat.S_IFLNK: "a symbolic link"}
    observed = kinds.get(stat.S_IFMT(entry.st_mode), "a special file")
    if not stat.S_ISLNK(entry.st_mode):
        observed += f" with mode {stat.S_IMODE(entry.st_mode):04o}"
    return UntrustedPathError(
        path=path, observed=observed, expected=expected, owner=owner(entry.st_uid)
    )
