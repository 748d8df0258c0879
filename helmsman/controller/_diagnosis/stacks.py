"""Reading of stacks: the frame in the user's code, the kind of a wait, and groups of equal stacks.

Only Python frames are visible. A blocking C function is recognised by the source line that calls
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from helmsman.api.run_state import Frame, StackTrace

WaitKind = Literal[
    "collective",
    "loader",
    "sleep",
    "name lookup",
    "connection",
    "lock",
    "message",
    "process",
    "file",
]

_COLLECTIVES = (
    "all_reduce|all_gather|all_gather_into_tensor|all_gather_single|all_gather_object|all_to_all|"
    "all_to_all_single|barrier|monitored_barrier|broadcast|broadcast_object_list|gather|"
    "gather_object|recv|reduce|reduce_scatter|reduce_scatter_tensor|scatter|scatter_object_list|"
    "send|batch_isend_irecv|new_group|init_process_group|init_device_mesh"
)
_COLLECTIVE_NAMES = frozenset(_COLLECTIVES.split("|"))
_COLLECTIVE_CALL = re.compile(
    rf"\b(?:dist|distributed|torch\.distributed|c10d|group|pg)\.({_COLLECTIVES})\("
)
_WAITS: tuple[tuple[WaitKind, re.Pattern[str], re.Pattern[str]], ...] = (
    # kind, pattern of 'file:function' of an inner frame, pattern of the innermost source line
    (
        "name lookup",
        re.compile(r"socket\.py:getaddrinfo"),
        re.compile(r"\bgetaddrinfo\(|gethostby"),
    ),
    (
        "process",
        re.compile(r"subprocess\.py:|popen_fork\.py:|asyncio/subprocess\.py:"),
        re.compile(r"\bwaitpid\(|\.communicate\(|\.wait_for_exit\(|\bsubprocess\.run\("),
    ),
    (
        "connection",
        re.compile(
            r"/(?:socket|ssl|http/client|urllib3/\w+|selector_events|aiohttp/\w+)\.py:"
            r"(?:create_connection|connect|do_handshake|_read_status|recv_into|readinto|read|"
            r"recv|sock_recv|sock_connect|send|sendall|_make_request|getresponse|accept)$"
        ),
        re.compile(
            r"\.(?:recv|recv_into|accept|connect|sendall|create_connection|urlopen)\(|"
            r"\brequests\.(?:get|post|put)\(|\burlopen\("
        ),
    ),
    (
        "message",
        re.compile(
            r"(?:/queue\.py:get|multiprocessing/(?:connection|queues|synchronize)\.py:|"
            r"asyncio/queues\.py:get)"
        ),
        re.compile(r"(?:queue|\bq|pipe|conn\w*|inbox)\.(?:get|recv|put)\("),
    ),
    (
        "lock",
        re.compile(
            r"(?:threading\.py:(?:acquire|wait|join|__enter__)|asyncio/locks\.py:)|filelock"
        ),
        re.compile(
            r"\.acquire\(|\bwith\b.*\block\b|\bwith\b.*_lock\b|\.wait\(\)|\.join\(\)|\bflock\(|"
            r"\blockf\(|\.result\(\)"
        ),
    ),
    ("sleep", re.compile(r"asyncio/tasks\.py:sleep"), re.compile(r"\bsleep\(")),
    (
        "file",
        re.compile(r"(?!)"),
        re.compile(r"\bopen\(|\.read\(|\.write\(|\bfsync\(|\.read_text\("),
    ),
)
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages)/|/lib/python3\.\d+/|^<")
_OWN = re.compile(r"/helmsman/(?:api|controller|rpc_server|engines|recipes|compat)/")


class Wait(NamedTuple):
    """What a stack waits for."""

    kind: WaitKind
    what: str
    """Name of the collective; '' for other kinds."""
    site: Frame | None
    """Innermost frame in the user's code, else innermost frame."""


def site_of(stack: StackTrace) -> Frame | None:
    """Return the innermost frame in the user's code; else the innermost one; None if empty."""
    for frame in reversed(stack.frames):
        if not _LIBRARY.search(frame.file) and not _OWN.search(frame.file):
            return frame
    return stack.frames[-1] if stack.frames else None


def wait_of(stack: StackTrace) -> Wait | None:
    """Return the wait of a stack; None if it computes, or waits in an unknown way."""
    if not stack.frames:
        return None
    site = site_of(stack)
    for frame in reversed(stack.frames):
        is_distributed = "torch/distributed/" in frame.file
        if is_distributed and frame.function in _COLLECTIVE_NAMES:
            return Wait("collective", frame.function, site)
        called = _COLLECTIVE_CALL.search(frame.text)
        if called and (frame is stack.frames[-1] or _inside_torch(stack, frame)):
            return Wait("collective", called[1], site)
    if _in_loader(stack):
        return Wait("loader", "", site)
    inner = stack.frames[-4:]
    text = stack.frames[-1].text
    for kind, path, line in _WAITS:
        if any(path.search(f"{each.file}:{each.function}") for each in inner) or line.search(text):
            return Wait(kind, "", site)
    return None


def _in_loader(stack: StackTrace) -> bool:
    """Whether a DataLoader waits for its processes, rather than for the user's code in it."""
    places = [
        number
        for number, each in enumerate(stack.frames)
        if each.file.endswith("torch/utils/data/dataloader.py")
    ]
    return bool(places) and all(_LIBRARY.search(e.file) for e in stack.frames[places[-1] :])


def _inside_torch(stack: StackTrace, frame: Frame) -> bool:
    below = stack.frames[stack.frames.index(frame) + 1 :]
    return any("/torch/" in each.file for each in below)


def describe_wait(wait: Wait) -> str:
    """Describe a wait as a predicate: 'waits in all_reduce at train.py:210'."""
    at = f" at {place(wait.site)}" if wait.site is not None else ""
    verb = {
        "collective": f"waits in {wait.what}",
        "loader": "waits for a DataLoader",
        "sleep": "sleeps",
        "name lookup": "waits for a name lookup",
        "connection": "waits for a network peer",
        "lock": "waits for a lock or event",
        "message": "waits for a message of another thread or process",
        "process": "waits for a child process",
        "file": "waits for a file",
    }[wait.kind]
    return f"{verb}{at}"


def place(frame: Frame) -> str:
    """Format the place of a frame: 'train.py:210 (all_reduce(x))'."""
    text = f" ({frame.text[:80]})" if frame.text else f" ({frame.function})"
    return f"{frame.file.rpartition('/')[2]}:{frame.line}{text}"


def signature(stack: StackTrace) -> tuple[tuple[str, int, str], ...]:
    """Return a key that equal stacks share."""
    return tuple((each.file, each.line, each.function) for each in stack.frames)


def grouped(
    stacks: Mapping[str, Sequence[StackTrace]],
) -> list[tuple[list[str], Sequence[StackTrace]]]:
    """Group processes with equal stacks, the largest group first.

    Args:
        stacks: Process -> its stacks.

    Returns:
        (processes, stacks) of each group.
    """
    groups: dict[object, tuple[list[str], Sequence[StackTrace]]] = {}
    for name, found in stacks.items():
        key = tuple((each.thread if not each.call else "", signature(each)) for each in found)
        groups.setdefault(key, ([], found))[0].append(name)
    return sorted(groups.values(), key=lambda group: -len(group[0]))


def named(names: Iterable[str], most: int = 6) -> str:
    """Format worker ids, ranges of one role together: 'actor/0-14, actor/16'."""
    by_role: dict[str, list[int]] = {}
    others = []
    for name in names:
        role, _, index = name.rpartition("/")
        if role and index.isdigit():
            by_role.setdefault(role, []).append(int(index))
        else:
            others.append(name)
    parts = others
    for role, indices in by_role.items():
        for first, last in _ranges(sorted(indices)):
            parts.append(f"{role}/{first}" if first == last else f"{role}/{first}-{last}")
    more = f" and {len(parts) - most} more" if len(parts) > most else ""
    return ", ".join(parts[:most]) + more


def _ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
