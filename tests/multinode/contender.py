"""A controller in a process of its own: for each line of jobs it acquires their placement groups,
frees them, and prints the outcome.

python -m tests.multinode.contender ADDRESS
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from helmsman._base.event_loop import Deadline, submit
from helmsman.api import errors
from helmsman.api.scheduler import Job
from helmsman.controller._scheduler.ray.placement_groups import admit
from helmsman.controller._scheduler.ray.scheduler import RayScheduler

LIMIT_S = 120.0


async def admit_and_free(prefix: str, jobs: Sequence[Job]) -> str:
    """Return 'placed' when the jobs had all groups, 'refused' when others held the resources until
    the deadline.
    """
    async with contextlib.AsyncExitStack() as stack:
        stacks = {
            job.role: await stack.enter_async_context(contextlib.AsyncExitStack()) for job in jobs
        }
        try:
            slots = await admit(jobs, prefix, Deadline(LIMIT_S), stacks)
        except errors.PlacementTimeoutError:
            return "refused"
        complete = {role: len(found) for role, found in slots.items()} == {
            job.role: job.replicas for job in jobs
        }
        return "placed" if complete else f"incomplete: {slots}"


def main() -> None:
    """Serve until the end of the input."""
    with RayScheduler(address=sys.argv[1]) as run:
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            jobs: Any = msgspec.json.decode(line, type=list[Job])
            print(
                json.dumps(submit(admit_and_free(f"helmsman/{run.run_id}", jobs)).result()),
                flush=True,
            )


if __name__ == "__main__":
    main()
