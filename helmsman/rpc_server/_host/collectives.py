"""Last collectives of this process, from torch's flight recorder; NCCL ranks, from its RAS service.

The service answers in JSON from NCCL 2.28.7 on; earlier ones are not read.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec

from helmsman.api.run_state import CollectiveState, NcclRank

_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Functions of torch.distributed's extension: of gloo and other backends, and of NCCL."""
_RAS_VARIABLE = "NCCL_RAS_ADDR"
_RAS_ADDRESS = "localhost:28028"
_WAITS_S = 5.0
"""RAS is asked about a collective that waits for longer."""
_RAS_S = 1.0
_MOST_BYTES = 8 << 20


class _Entry(msgspec.Struct):
    process_group: tuple[str, str]
    collective_seq_id: int
    profiling_name: str
    input_sizes: list[list[int]]
    time_created_ns: int
    state: str
    retired: bool
    is_p2p: bool


class _Dump(msgspec.Struct):
    entries: list[_Entry] = []


def last_collectives() -> list[CollectiveState]:
    """Return the collective that this process entered last in each group; loads no torch.

    Groups that were destroyed or aborted are left out: their last collective may never complete.
    """
    extension = sys.modules.get("torch._C._distributed_c10d")
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    existing = set(getattr(world, "pg_names", {}).values())
    last: dict[tuple[str, str], _Entry] = {}
    for name in _DUMPS:
        dump = getattr(extension, name, None)
        if dump is None:
            continue
        with contextlib.suppress(RuntimeError, TypeError, msgspec.MsgspecError):  # private in torch
            for entry in msgspec.json.decode(dump(), type=_Dump).entries:
                if entry.is_p2p or entry.process_group[0] not in existing:
                    continue
                # A later group may have the name of an earlier one, and counts from 1 again.
                before = last.get(entry.process_group)
                if before is None or entry.time_created_ns >= before.time_created_ns:
                    last[entry.process_group] = entry
    return [
        CollectiveState(
            group=" ".join(filter(None, group)),
            number=each.collective_seq_id,
            name=each.profiling_name,
            sizes=each.input_sizes[:4],
            age_s=time.time() - each.time_created_ns / 1e9,
            is_done=each.retired or each.state == "completed",
        )
        for group, each in last.items()
    ]


class _Rank(msgspec.Struct):
    rank: int
    host: str
    pid: int
    collective_counts: dict[str, int] = {}
    status: dict[str, object] = {}


class _Communicator(msgspec.Struct):
    hash: str
    ranks: list[_Rank]
    missing_ranks: list[_Rank] = []

    def nccl_ranks(self) -> Iterator[NcclRank]:
        for each in (*self.ranks, *self.missing_ranks):
            problem = "dead" if each.status.get("considered_dead") else "unresponsive"
            yield NcclRank(
                communicator=self.hash,
                rank=each.rank,
                host=each.host,
                pid=each.pid,
                num_collectives=sum(each.collective_counts.values()),
                problem=problem if each in self.missing_ranks else "",
            )


class _Ras(msgspec.Struct):
    communicators: list[_Communicator]


def waiting_nccl_ranks(collectives: Sequence[CollectiveState]) -> list[NcclRank]:
    """Return the ranks of all communicators if this is rank 0 of a group that waits; else none."""
    distributed = sys.modules.get("torch.distributed")
    is_used = _RAS_VARIABLE in os.environ or any(e.name.startswith("nccl") for e in collectives)
    is_waiting = any(not each.is_done and each.age_s > _WAITS_S for each in collectives)
    if not (is_used and is_waiting) or distributed is None or not distributed.is_initialized():
        return []
    found: list[NcclRank] = []
    if distributed.get_rank() == 0:
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
            for communicator in msgspec.json.decode(_ask_ras(), type=_Ras).communicators:
                found += communicator.nccl_ranks()
    return found


def _ask_ras() -> bytes:
    """Return the answer of the RAS service of this node. Raises OSError or ValueError."""
    host, _, port = os.environ.get(_RAS_VARIABLE, _RAS_ADDRESS).rpartition(":")
    with (
        socket.create_connection((host.strip("[]"), int(port)), timeout=_RAS_S) as peer,
        peer.makefile("rwb") as stream,
    ):
        for line, expected in (
            (b"CLIENT PROTOCOL 2\n", b"SERVER PROTOCOL"),
            (b"TIMEOUT 1\n", b"OK"),
            (b"SET FORMAT json\n", b"OK"),
        ):
            stream.write(line)
            stream.flush()
            answer = stream.readline(1024)
            if not answer.startswith(expected):
                raise ValueError(f"NCCL RAS answered {answer!r} to {line!r}")
        stream.write(b"VERBOSE STATUS\n")
        stream.flush()
        return stream.read(_MOST_BYTES)
