"""The last collective of each process group of this process, from torch's flight recorder."""

from __future__ import annotations

import contextlib
import sys
import time

import msgspec

from helmsman.api.run_state import CollectiveState

_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Functions of torch.distributed's extension: of gloo and other backends, and of NCCL."""


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
    """Return the collective that this process entered last in each group; loads no torch."""
    extension = sys.modules.get("torch._C._distributed_c10d")
    last: dict[tuple[str, str], _Entry] = {}
    for name in _DUMPS:
        dump = getattr(extension, name, None)
        if dump is None:
            continue
        with contextlib.suppress(RuntimeError, TypeError, msgspec.MsgspecError):  # private in torch
            for entry in msgspec.json.decode(dump(), type=_Dump).entries:
                before = last.get(entry.process_group)
                if not entry.is_p2p and (
                    before is None or entry.collective_seq_id >= before.collective_seq_id
                ):
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
