"""A trainer and a rollout on shared devices, for tests of ViaDevice.

The devices are logical, and their memory is the host's.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from helmsman import SchedulingSpec
from helmsman.api.weights import WeightFormat
from helmsman.controller._weights.sync import SyncReport
from helmsman.controller._weights.via_device import ViaDevice
from tests.contract.helpers import has_stopped, stop, wait_until
from tests.controller.sync_engines import STOP
from tests.controller.sync_world import World

ON_DEVICE: dict[str, Any] = {
    "spec": SchedulingSpec(cpu=0.1, gpu=1, env_vars={"HELMSMAN_PLATFORM": "cpu"}),
    "beside": True,
}
FORM = WeightFormat(bucket_bytes=2000, checksum=True)
"""Format with dozens of buckets, so that a stopped receiver is in the middle of them."""
NO_LIMIT = 3600.0
"""Limit in seconds that no passing test waits for."""


def memories(pid: int) -> dict[int, int]:
    """Return size by inode of the weight buffers that a process has open or mapped."""
    found = {}
    for entry in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{entry}"
        with contextlib.suppress(FileNotFoundError):
            if "memfd:helmsman-weights" in os.readlink(path):
                found[os.stat(path).st_ino] = os.stat(path).st_size
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:helmsman-weights" in line:
            found.setdefault(int(line.split()[4]), 0)
    return found


def all_pids(world: World) -> list[int]:
    """Return the pids of all workers."""
    return [world.pid(each.id) for each in (*world.trainer.workers, *world.rollout.workers)]


def require_released(world: World) -> None:
    """Check that no worker has a weight buffer."""
    assert [memories(pid) for pid in all_pids(world)] == [{}] * 4


def require_current(world: World) -> None:
    """Check that all instances have the trainer's weights, and that no buffer is left."""
    assert not any(world.differing().values())
    require_released(world)


@contextlib.contextmanager
def stopped_in_a_sync(world: World) -> Iterator[Future[SyncReport]]:
    """Stop the last instance in the middle of a sync, and yield the push that waits for it.

    The first instance stops before it connects, so that no bucket can be gathered before the last
    one has stopped.
    """
    world.step()
    first, last = map(world.pid, world.ids)
    rank = world.pid(world.trainer.workers[-1].id)
    largest = max(each.nbytes for each in world.expected().values())
    world.scheduler.call_engine(world.ids[0], "fail_in_next_update", None, STOP)
    with ThreadPoolExecutor(1) as threads, ExitStack() as stack:
        for pid in (first, last):
            stack.callback(resume, pid)
        pushing = threads.submit(world.sync(ViaDevice(NO_LIMIT), form=FORM).push, 600.0)
        wait_until(lambda: len(memories(last)) == 2, "the last instance has mapped both buffers")
        stop(last)
        wait_until(lambda: has_stopped(first), "the first instance has stopped")
        resume(first)
        wait_until(lambda: all(map(any, buffers(rank))), "both buffers are filled")
        assert memories(last).keys() == memories(rank).keys()
        assert list(memories(rank).values()) == [max(largest, FORM.bucket_bytes)] * 2
        yield pushing


def resume(pid: int) -> None:
    """Resume a process, if it exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def buffers(rank: int, change: Callable[[int], int] | None = None) -> list[bytes]:
    """Return the contents of a rank's buffers, in the order in which they are filled.

    Args:
        rank: Pid of the rank.
        change: Function that is applied to each byte of the second buffer.
    """
    found: list[tuple[int, bytes]] = []
    for entry in sorted(map(int, os.listdir(f"/proc/{rank}/fd"))):
        path = f"/proc/{rank}/fd/{entry}"
        with contextlib.suppress(FileNotFoundError):
            if "memfd:helmsman-weights" not in os.readlink(path):
                continue
            inode = os.stat(path).st_ino
            if inode in [each for each, _ in found]:
                continue  # Each mapping has a descriptor of its own.
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                if change is not None and found:
                    memory[:] = bytes(map(change, memory[:]))
                found.append((inode, memory[:]))
    return [content for _, content in found]
