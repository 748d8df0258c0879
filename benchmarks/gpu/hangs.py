"""Diagnosis of collectives on devices, which no Python stack shows."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from benchmarks.gpu.harness import Machine, check
from helmsman import Job
from helmsman._base.event_loop import run_sync
from helmsman._desk.diagnosis import diagnose_run
from helmsman._desk.runs import find_run, take_two
from helmsman.api.run_state import NcclRank
from helmsman.api.scheduler import Call

_LIMIT_S = 90.0


class Ranks:
    """Rank 0 polls a collective that rank 1 does not enter."""

    def hang(self, rank: int, port: int, backend: str) -> None:
        import torch
        import torch.distributed as dist

        from helmsman.api.platforms import current_platform

        device = current_platform.device(0)
        current_platform.set_device(0)
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=2)
        tensor = torch.ones(4, device=device)
        dist.all_reduce(tensor)
        if rank == 1:
            time.sleep(3600)
        work: Any = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed():
            time.sleep(0.5)


@check("hangs.rank_missing")
def rank_missing(machine: Machine) -> dict[str, str]:
    """`helmsman why` names the rank by the flight recorder; NCCL's RAS service answers rank 0."""
    machine.require(2, "a collective with a missing rank")
    machine.require_own_devices("a collective of NCCL")
    scheduler = machine.scheduler
    spec = msgspec.structs.replace(machine.spec(), port_count=1)
    ids = scheduler.create_workers(Job(role="hangs", replicas=2, tasks=[spec]))
    try:
        scheduler.create_engines(ids, Ranks)
        port = int(scheduler.get_workers("hangs")[0].engine_ports[0])
        backend = "gloo" if machine.is_rehearsal else "nccl"

        async def begin() -> None:
            calls = {each: Call((i, port, backend), {}, None) for i, each in enumerate(ids)}
            scheduler.call_many(calls, "hang")

        run_sync(begin())
        deadline = time.monotonic() + _LIMIT_S
        found: list[Any] = []
        ranks: list[NcclRank] = []
        while not found and time.monotonic() < deadline:
            now, before = take_two(find_run(scheduler.run_id), "hangs")
            found = [each for each in diagnose_run(now, before).findings if each.is_problem]
            ranks = [e for w in now.workers if w.report for e in w.report.nccl_ranks]
        assert [each.subject for each in found] == ["hangs/1"], found
        assert "of group '0 default_pg'" in found[0].cause, found
        if not machine.is_rehearsal:
            assert {each.rank for each in ranks} == {0, 1}, ranks
        return {"found after": f"{found[0].since_s:.0f} s", "ranks by RAS": str(len(ranks))}
    finally:
        scheduler.delete_workers("hangs")
