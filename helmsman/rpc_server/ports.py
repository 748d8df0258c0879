"""Ports leased by the process that will bind them, and held until it does.

A lease is two things. A **lock**: a Unix socket in the kernel's abstract namespace, named after the port. It is seen by every
process that shares the port space (both belong to the network namespace), costs no file, and ends with its process, however
that dies; so no two workers of any run on a node are given one port. And a **hold**: the port is bound, on IPv4 and IPv6,
without listening, so that other programs which look for a free port pass it by.

Whoever binds the port with SO_REUSEADDR or SO_REUSEPORT does not notice the hold: torch's TCPStore, asyncio, uvicorn, gRPC,
ZMQ. For those who bind it plainly the hold has to go first, and it goes by itself where Python tells of the bind beforehand:

- a plain ``bind`` in this process;
- a program started with the port's number among its arguments, or in what its environment has of its own.

In other cases (a plain bind in C, or in a forked child) call ``hand_over`` before. The lock stays until the process ends. A
fork made by Python inherits neither; what is forked in C ends with the worker's family (guardian.py).

What a hold cannot keep off is a foreign program that insists on just this port number and sets SO_REUSEADDR.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import re
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

RANGE_VARIABLE = "HELMSMAN_PORT_RANGE"
"""Environment variable with the first and the last port that may be leased: '20000-20200'."""
PORTS_VARIABLE = "HELMSMAN_PORTS"
"""In a child that runs a spec's command: the ports leased for it, 'port,port'."""
FIRST_PORT = 20_000
_EPHEMERAL_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
_TAKEN = (errno.EADDRINUSE, errno.EACCES)
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.EADDRNOTAVAIL)
_NUMBER = re.compile(r"(?<!\d)\d{4,5}(?!\d)")

_holds: dict[int, list[socket.socket]] = {}
"""The bound sockets of each port that this process holds; changed by one operation at a time, since audit hooks change it."""
_locks: set[socket.socket] = set()
_install = threading.Lock()
_installed = False


class PortLeases:
    """The ports leased to one worker."""

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    @property
    def leased(self) -> tuple[int, ...]:
        """In the order in which they were leased."""
        return tuple(self._held)

    def lease(self, count: int) -> list[int]:
        """Lease ``count`` more ports that nobody holds or has bound: below the ephemeral range, or of HELMSMAN_PORT_RANGE.

        Raises: OSError when there are not that many; ValueError for a HELMSMAN_PORT_RANGE that is none.
        """
        first, last = port_range(os.environ)
        candidates = list(range(first, last + 1))
        if count > len(candidates):
            raise OSError(
                f"at most {len(candidates)} of {count} ports are free: {first} to {last} are no more; ask for fewer, "
                f"or set {RANGE_VARIABLE} to a wider range"
            )
        _install_hooks()
        random.SystemRandom().shuffle(candidates)
        with contextlib.ExitStack() as undo:
            leased: list[int] = []
            num_ours = num_foreign = 0
            for port in candidates:
                if len(leased) == count:
                    break
                lock = None if port in self._held else _lock(port)
                if lock is None:
                    num_ours += 1
                    continue
                self._held[port] = lock
                undo.callback(self._release, port)
                if _hold(port):
                    leased.append(port)
                else:
                    num_foreign += 1
                    self._release(port)
            if len(leased) < count:
                raise OSError(
                    f"only {len(leased)} of {count} ports are free: of the {len(candidates)} ports {first}-{last} of this node "
                    f"Helmsman's workers have leased {num_ours}, other programs have bound {num_foreign} (or had until a "
                    f"minute ago); end what needs them no longer, or set {RANGE_VARIABLE} to a wider range"
                )
            undo.pop_all()
        return leased

    def _release(self, port: int) -> None:
        lock = self._held.pop(port, None)
        if lock is not None:
            hand_over(port)
            _locks.discard(lock)
            lock.close()

    def close(self) -> None:
        """Give all leases back."""
        for port in list(self._held):
            self._release(port)


def hand_over(port: int) -> None:
    """Let go of the hold on a leased port just before something binds it that Python does not tell of; see the module.

    The lease itself stays with the worker. Nothing happens for a port that this process does not hold.
    """
    for sock in _holds.pop(port, ()):
        sock.close()


def port_range(environ: Mapping[str, str]) -> tuple[int, int]:
    """The first and the last port that may be leased on this node.

    Raises: ValueError for a HELMSMAN_PORT_RANGE that is none.
    """
    value = environ.get(RANGE_VARIABLE, "").strip()
    if not value:
        return FIRST_PORT, _first_ephemeral_port() - 1
    match = re.fullmatch(r"(\d{1,5})\s*-\s*(\d{1,5})", value)
    if match is None or not 1024 <= int(match[1]) <= int(match[2]) <= 65_535:
        raise ValueError(
            f"{RANGE_VARIABLE} is {value!r}; expected 'FIRST-LAST' with 1024 <= FIRST <= LAST <= 65535, such as 20000-20200, "
            "or leave it unset for the ports from 20000 to the ephemeral range"
        )
    return int(match[1]), int(match[2])


def _first_ephemeral_port() -> int:
    try:
        with open(_EPHEMERAL_RANGE) as file:
            return max(FIRST_PORT + 1000, int(file.read().split()[0]))
    except OSError:
        return 32_768


# --- locks and holds ----------------------------------------------------------------------------------------------------


def _lock(port: int) -> socket.socket | None:
    """The lock of a port; None when somebody has it."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        if sys.platform == "linux":  # no abstract namespace elsewhere: the hold, which is bound strictly, is all there is
            lock.bind(f"\0helmsman/port/{port}")
    except OSError:
        lock.close()
        return None
    _locks.add(lock)
    return lock


def _hold(port: int) -> bool:
    """Bind a port strictly, and only then allow others that reuse it; returns whether it was free."""
    with contextlib.ExitStack() as undo:
        sockets = []
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            try:
                sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind((address, port))
            except OSError as error:
                if error.errno in _TAKEN:
                    return False
                if family == socket.AF_INET6 and error.errno in _NO_IPV6:
                    continue
                raise
            sockets.append(sock)
        for sock in sockets:
            for option in _REUSE:
                sock.setsockopt(socket.SOL_SOCKET, option, 1)
        _holds[port] = sockets
        undo.pop_all()
    return True


_REUSE = [socket.SO_REUSEADDR] + ([socket.SO_REUSEPORT] if hasattr(socket, "SO_REUSEPORT") else [])


# --- what lets a hold go by itself --------------------------------------------------------------------------------------


def _install_hooks() -> None:
    """Once in a process, and only in one that leases ports: an audit hook cannot be taken out again."""
    global _installed
    with _install:
        if not _installed:
            _installed = True
            sys.addaudithook(_audit)
            os.register_at_fork(after_in_child=_forget_in_child)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Called for every audited event of the process, so it decides by the name alone. It never raises: that would stop what
    is audited."""
    if event in _AUDITED and _holds:
        try:
            if event == "socket.bind":
                _before_bind(*args)
            else:
                _before_program(event, args)
        except Exception as error:  # noqa: BLE001 - arguments of any kind pass here, and must not fail because of us
            print(f"helmsman: a leased port may still be held: {type(error).__name__}: {error}", file=sys.stderr)


_AUDITED = frozenset({"socket.bind", "subprocess.Popen", "os.posix_spawn", "os.system"})


def _before_bind(sock: socket.socket, address: Any) -> None:
    if not isinstance(address, tuple) or len(address) < 2 or address[1] not in _holds:
        return
    if not any(sock.getsockopt(socket.SOL_SOCKET, option) for option in _REUSE):
        hand_over(address[1])


def _before_program(event: str, args: tuple[Any, ...]) -> None:
    """args: (executable, args, cwd, env) of subprocess, (path, argv, env) of posix_spawn, (command,) of system."""
    texts = _texts(args[0] if event == "os.system" else args[1])
    environ = args[-1] if event != "os.system" else None
    if environ:  # what the child has in common with us says nothing about it: MASTER_PORT is rank 0's to bind, in this process
        ours = {os.fsencode(name): os.fsencode(value) for name, value in os.environ.items()}
        theirs = {os.fsencode(name): os.fsencode(value) for name, value in environ.items()}
        texts = itertools.chain(texts, (os.fsdecode(value) for name, value in theirs.items() if ours.get(name) != value))
    for text in texts:
        for number in _NUMBER.findall(text):
            hand_over(int(number))


def _texts(arguments: Any) -> Iterator[str]:
    parts: Iterable[Any] = [arguments] if isinstance(arguments, (str, bytes, os.PathLike)) else arguments
    return (os.fsdecode(part) for part in parts)


def _forget_in_child() -> None:
    """A forked child is not the owner: what it inherited would keep a port taken after its worker has ended."""
    for sock in itertools.chain(_locks, *_holds.values()):
        sock.close()
    _locks.clear()
    _holds.clear()
