"""Reading of stacks: the frame in the user's code, the kind of a wait, and groups of equal stacks.

Only Python frames are visible. A blocking C function is recognised by the source line that calls
it.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from helmsman.api.run_state import Frame, StackTrace

_COLLECTIVES = (
    "all_reduce|all_gather|all_gather_into_tensor|all_gather_single|all_gather_object|all_to_all|"
    "all_to_all_single|barrier|monitored_barrier|broadcast|broadcast_object_list|gather|"
    "gather_object|recv|reduce|reduce_scatter|reduce_scatter_tensor|scatter|scatter_object_list|"
    "send|batch_isend_irecv|new_group|init_process_group|init_device_mesh"
)
_COLLECTIVE_NAME = re.compile(_COLLECTIVES)
_COLLECTIVE_CALL = re.compile(
    rf"\b(?:dist|distributed|torch\.distributed|c10d|group|pg)\.({_COLLECTIVES})\("
)
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages)/|/lib/python3\.\d+/|^<")
_MOST_NAMES = 6
_OWN = re.compile(r"/helmsman/(?:api|controller|rpc_server|engines|recipes|compat)/")


class _Way(NamedTuple):
    """A way of waiting."""

    verb: str
    next_step: str = "helmsman stacks shows all threads."
    inner: str = "(?!)"
    """Pattern of 'file:function' of one of the innermost frames."""
    line: str = "(?!)"
    """Pattern of the innermost source line."""


_WAYS = {
    "collective": _Way("waits in"),
    "loader": _Way("waits for a DataLoader", "Check its worker processes and the data's storage."),
    "name lookup": _Way(
        "waits for a name lookup",
        "Check /etc/resolv.conf and the name server of the node.",
        r"socket\.py:getaddrinfo",
        r"\bgetaddrinfo\(|gethostby",
    ),
    "process": _Way(
        "waits for a child process",
        "Look at the child process.",
        r"subprocess\.py:|popen_fork\.py:|asyncio/subprocess\.py:",
        r"\bwaitpid\(|\.communicate\(|\.wait_for_exit\(|\bsubprocess\.run\(",
    ),
    "connection": _Way(
        "waits for a network peer",
        "Check that the peer runs and that no firewall is in between; set a timeout.",
        r"/(?:socket|ssl|http/client|urllib3/\w+|selector_events|aiohttp/\w+)\.py:"
        r"(?:create_connection|connect|do_handshake|_read_status|recv_into|readinto|read|"
        r"recv|sock_recv|sock_connect|send|sendall|_make_request|getresponse|accept)$",
        r"\.(?:recv|recv_into|accept|connect|sendall|create_connection|urlopen)\(|"
        r"\brequests\.(?:get|post|put)\(|\burlopen\(",
    ),
    "message": _Way(
        "waits for a message of another thread or process",
        "Look at the process that should send it.",
        r"/queue\.py:get|multiprocessing/(?:connection|queues|synchronize)\.py:|"
        r"asyncio/queues\.py:get",
        r"(?:queue|\bq|pipe|conn\w*|inbox)\.(?:get|recv|put)\(",
    ),
    "lock": _Way(
        "waits for a lock or event",
        "Look for the thread or process that holds it; helmsman stacks shows all threads.",
        r"threading\.py:(?:acquire|wait|join|__enter__)|asyncio/locks\.py:|filelock",
        r"\.acquire\(|\bwith\b.*(?:\b|_)lock\b|\.wait\(\)|\.join\(\)|\bflock\(|\blockf\(|"
        r"\.result\(\)",
    ),
    "sleep": _Way("sleeps", inner=r"asyncio/tasks\.py:sleep", line=r"\bsleep\("),
    "file": _Way(
        "waits for a file",
        "Check the file system; a named pipe or a network mount may block.",
        line=r"\bopen\(|\.read\(|\.write\(|\bfsync\(|\.read_text\(",
    ),
}
"""Kind of a wait -> how it is described and recognised; the first that fits counts."""


class Wait(NamedTuple):
    """The wait of a stack."""

    kind: str
    text: str
    """Its description: 'waits in all_reduce at train.py:210 (all_reduce(x))'."""
    next_step: str


def site_of(stack: StackTrace | None) -> Frame | None:
    """Return the innermost frame in the user's code; else the innermost one; None if empty."""
    if stack is None or not stack.frames:
        return None
    return next(filter(_is_users, reversed(stack.frames)), stack.frames[-1])


def _is_users(frame: Frame) -> bool:
    return not _LIBRARY.search(frame.file) and not _OWN.search(frame.file)


def users_stacks(stacks: Iterable[StackTrace]) -> Counter[tuple[tuple[str, int, str], ...]]:
    """Count the equal stacks that are in the user's code."""
    return Counter(signature(each) for each in stacks if any(map(_is_users, each.frames)))


def in_helmsman(stack: StackTrace | None) -> bool:
    """Return whether a stack passes through Helmsman's code."""
    return stack is not None and any(_OWN.search(each.file) for each in stack.frames)


def at(stack: StackTrace | None) -> str:
    """Return ' at train.py:210 (...)'; '' for no stack."""
    site = site_of(stack)
    return f" at {place(site)}" if site is not None else ""


def wait_of(stack: StackTrace | None) -> Wait | None:
    """Return the wait of a stack; None if it computes, or waits in an unknown way."""
    if stack is None or not stack.frames:
        return None
    is_connected = stack.progress is not None and stack.progress.quiet_s is not None
    kind = _kind_of(stack.frames) or ("connection" if is_connected else "")
    if not kind:
        return None
    kind, _, collective = kind.partition(":")
    verb = f"{_WAYS[kind].verb} {collective}".rstrip()
    return Wait(kind, verb + at(stack), _WAYS[kind].next_step)


def _kind_of(frames: Sequence[Frame]) -> str:
    """Return the kind of the wait of these frames, 'collective:' with its name; '' for none."""
    for number, frame in reversed(list(enumerate(frames))):
        if "torch/distributed/" in frame.file and _COLLECTIVE_NAME.fullmatch(frame.function):
            return f"collective:{frame.function}"
        below = frames[number + 1 :]
        called = _COLLECTIVE_CALL.search(frame.text)
        if called and (not below or any("/torch/" in each.file for each in below)):
            return f"collective:{called[1]}"
        if frame.file.endswith("torch/utils/data/dataloader.py"):
            # It waits for its processes, unless it executes the user's code.
            if all(_LIBRARY.search(each.file) for each in below):
                return "loader"
            break
    inner = [f"{each.file}:{each.function}" for each in frames[-4:]]
    for kind, way in _WAYS.items():
        if any(re.search(way.inner, each) for each in inner) or re.search(
            way.line, frames[-1].text
        ):
            return kind
    return ""


def place(frame: Frame) -> str:
    """Format the place of a frame: 'train.py:210 (all_reduce(x))'."""
    return f"{frame.file.rpartition('/')[2]}:{frame.line} ({frame.text[:80] or frame.function})"


def signature(stack: StackTrace | None) -> tuple[tuple[str, int, str], ...]:
    """Return a key that equal stacks share; () for none."""
    frames = stack.frames if stack is not None else ()
    return tuple((each.file, each.line, each.function) for each in frames)


def is_in_place(one: StackTrace | None, other: StackTrace | None) -> bool:
    """Return whether two stacks are in the same functions, or one in a function of the other."""
    functions = [[(file, name) for file, _, name in signature(each)] for each in (one, other)]
    return all(functions) and all(a == b for a, b in zip(*functions, strict=False))


def named(names: Iterable[str]) -> str:
    """Format worker ids, ranges of one role together: 'actor/0-14, actor/16'."""
    by_role: dict[str, list[int]] = {}
    parts = []
    for name in names:
        role, _, index = name.rpartition("/")
        if role and index.isdigit():
            by_role.setdefault(role, []).append(int(index))
        else:
            parts.append(name)
    for role, indices in by_role.items():
        in_order = enumerate(sorted(indices))
        for _, pairs in itertools.groupby(in_order, key=lambda pair: pair[1] - pair[0]):
            numbers = [number for _, number in pairs]
            last = f"-{numbers[-1]}" if len(numbers) > 1 else ""
            parts.append(f"{role}/{numbers[0]}{last}")
    more = f" and {len(parts) - _MOST_NAMES} more" if len(parts) > _MOST_NAMES else ""
    return ", ".join(parts[:_MOST_NAMES]) + more
