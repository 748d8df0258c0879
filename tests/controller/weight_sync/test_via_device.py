"""Weights through buffers that a trainer rank shares with the instance on its device.

With real engines in real processes; the devices are logical, and their memory is the host's.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from helmsman import (
    HelmsmanError,
    LocalScheduler,
    SamplingParams,
    Scheduler,
    SchedulingSpec,
    SupervisionPolicy,
    make_scheduler,
)
from helmsman.api.weights import WeightFormat
from helmsman.controller._generation.health import Health
from helmsman.controller._weight_sync.sync import SyncReport
from helmsman.controller._weight_sync.via_device import ViaDevice
from tests.contract.helpers import has_stopped, stop, wait_until
from tests.controller.sync_engines import KILL, STOP
from tests.controller.sync_world import PROMPT, SUPERVISED, SharedWorld, World
from tests.engines.preload import PRELOAD
from tests.engines.small_models import random_tokens

pytestmark = pytest.mark.slow

ON_DEVICE: dict[str, Any] = {
    "spec": SchedulingSpec(cpu=0.1, gpu=1, env_vars={"HELMSMAN_PLATFORM": "cpu"}),
    "beside": True,
}
FORM = WeightFormat(bucket_bytes=2000, checksum=True)
"""Dozens of buckets, so that a receiver that stands still is in the middle of them."""
NO_LIMIT = 3600.0
"""A test that passes with it has not waited for a limit."""


@pytest.fixture(scope="module")
def scheduler() -> Iterator[Scheduler]:
    with LocalScheduler(num_gpus=4, preload=PRELOAD) as scheduler:
        yield scheduler


@pytest.fixture(scope="module")
def shared(scheduler: Scheduler) -> Iterator[SharedWorld]:
    shared = SharedWorld(lambda: World(scheduler, 2, 2, supervision=SUPERVISED, **ON_DEVICE))
    with contextlib.closing(shared):
        yield shared


def memories(pid: int) -> dict[int, int]:
    """Inode and size of the weight buffers that a process has open or mapped."""
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
    return [world.pid(each.id) for each in (*world.trainer.workers, *world.rollout.workers)]


def require_released(world: World) -> None:
    assert [memories(pid) for pid in all_pids(world)] == [{}] * 4


def require_current(world: World) -> None:
    assert not any(world.differing().values())
    require_released(world)


def test_push_is_the_default_on_shared_devices(world: World, tmp_path: Path) -> None:
    """Tokens and log-probabilities are those of the exported model."""
    for _ in range(2):
        version = world.step()
        assert all(world.differing().values())
        report = world.sync(form=FORM).push()
        assert (report.version, report.updated, report.failed) == (version, world.ids, {})
        assert report.num_bytes == sum(each.nbytes for each in world.expected().values())
        require_current(world)
    world.trainer.export_hf(str(tmp_path / "exported"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    prompts = [PROMPT, random_tokens(9, seed=2), random_tokens(3, seed=3), PROMPT[:2]]
    results = world.rollout.generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=8))
    for prompt, result in zip(prompts, results, strict=True):
        row = torch.tensor([prompt + result.token_ids])
        with torch.no_grad():
            logprobs = model(row).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert logprobs.argmax(-1).tolist() == result.token_ids
        chosen = logprobs.gather(1, row[0, len(prompt) :, None])[:, 0]
        assert torch.allclose(chosen, torch.tensor(result.logprobs), atol=1e-4)


def test_push_with_cast_and_larger_tensors_than_a_bucket(world: World) -> None:
    world.step()
    world.sync(form=WeightFormat(dtype="bfloat16", bucket_bytes=100)).push()
    expected = world.expected()
    for id_ in world.ids:
        served = world.scheduler.call_engine(id_, "parameters")
        assert all(
            torch.equal(served[name], tensor.bfloat16().float())
            for name, tensor in expected.items()
        )
    require_released(world)


def test_push_refuses_weights_that_do_not_fit(world: World) -> None:
    wrong = WeightFormat(names=(("embed_tokens", "embedding"),))
    world.step()
    with pytest.raises(HelmsmanError, match="which is unchanged. 1 missing"):
        world.sync(ViaDevice(NO_LIMIT), form=wrong).push()
    assert world.health() == [Health.STALE, Health.STALE]
    assert world.sync(form=FORM).push().updated == world.ids
    require_current(world)


def test_push_refuses_a_lower_version(world: World) -> None:
    """The rollout refuses it, and the trainer ranks do not wait for instances."""
    sync = world.sync(ViaDevice(NO_LIMIT))
    world.step()
    last = sync.push().version
    world.trainer.set_version(last - 1)
    with pytest.raises(ValueError, match="weight version is"):
        sync.push()
    world.trainer.set_version(last + 1)
    assert sync.push().updated == world.ids
    require_current(world)


def test_push_without_an_instance_that_refuses(world: World) -> None:
    """It never connects, and its trainer rank does not wait for it."""
    able, unable = world.ids
    world.step()
    world.scheduler.call_engine(unable, "refuse_updates", None, True)
    try:
        report = world.sync(ViaDevice(NO_LIMIT)).push()
        assert report.updated == (able,)
        assert "this engine cannot read them" in report.failed[unable]
    finally:
        world.scheduler.call_engine(unable, "refuse_updates", None, False)
    assert world.sync(ViaDevice(NO_LIMIT)).push().updated == world.ids
    require_current(world)


@contextlib.contextmanager
def standing_in_a_sync(world: World) -> Iterator[Future[SyncReport]]:
    """Stop the last instance in the middle of a sync; yields the push, which waits for it.

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
            stack.callback(go_on, pid)
        pushing = threads.submit(world.sync(ViaDevice(NO_LIMIT), form=FORM).push, 600.0)
        wait_until(lambda: len(memories(last)) == 2, "it has mapped both buffers")
        stop(last)
        wait_until(lambda: has_stopped(first), "the first instance has stopped")
        go_on(first)
        wait_until(lambda: all(map(any, buffers(rank))), "both buffers are filled")
        assert memories(last).keys() == memories(rank).keys()
        assert list(memories(rank).values()) == [max(largest, FORM.bucket_bytes)] * 2
        yield pushing


def go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def buffers(rank: int, change: Callable[[int], int] | None = None) -> list[bytes]:
    """Contents of a rank's buffers, in the order in which they are filled.

    ``change`` is applied to each byte of the second one.
    """
    found: list[tuple[int, bytes]] = []
    for entry in sorted(map(int, os.listdir(f"/proc/{rank}/fd"))):
        path = f"/proc/{rank}/fd/{entry}"
        with contextlib.suppress(FileNotFoundError):
            if "memfd:helmsman-weights" not in os.readlink(path):
                continue
            inode = os.stat(path).st_ino
            if inode in [each for each, _ in found]:
                continue  # a mapping keeps a descriptor of its own
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                if change is not None and found:
                    memory[:] = bytes(map(change, memory[:]))
                found.append((inode, memory[:]))
    return [content for _, content in found]


def test_instance_that_dies_in_a_sync(world: World) -> None:
    with standing_in_a_sync(world) as pushing:
        os.kill(world.pid(world.ids[-1]), KILL)
        report = pushing.result(120)
    assert report.updated == world.ids[:-1]
    assert "SIGKILL" in report.failed[world.ids[-1]]
    trainers = [world.pid(each.id) for each in world.trainer.workers]
    assert [memories(pid) for pid in trainers] == [{}, {}]
    world.step()
    assert world.sync(ViaDevice(NO_LIMIT)).push().updated == world.ids[:-1]
    assert not any(world.differing(world.ids[:-1]).values())


def test_damaged_buffer_fails_its_instance(world: World) -> None:
    with standing_in_a_sync(world) as pushing:
        buffers(world.pid(world.trainer.workers[-1].id), lambda byte: byte ^ 1)
        go_on(world.pid(world.ids[-1]))
        report = pushing.result(120)
    assert report.updated == world.ids[:-1]
    assert re.search(
        "updated only in part: ValueError: .* wrong checks", report.failed[world.ids[-1]]
    )
    assert world.health()[-1] is Health.STALE
    assert world.sync(ViaDevice(NO_LIMIT)).push().updated == world.ids
    require_current(world)


def test_trainer_rank_that_dies_in_a_sync(world: World) -> None:
    with standing_in_a_sync(world) as pushing:
        os.kill(world.pid(world.trainer.workers[-1].id), KILL)
        go_on(world.pid(world.ids[-1]))
        with pytest.raises(HelmsmanError, match="SIGKILL"):
            pushing.result(120)
    world.trainer.recover()
    world.trainer.set_version(1 + max(filter(None, world.rollout.versions().values())))
    assert world.sync(ViaDevice(NO_LIMIT)).push().updated == world.ids
    require_current(world)


def is_in(world: World, health: Health) -> bool:
    return world.health() == [health]


def test_rebuilt_instance_receives_the_weights(scheduler: Scheduler) -> None:
    policy = SupervisionPolicy(
        probe_every_s=0.2, suspect_s=10.0, dead_s=60.0, max_restarts=9, restart_pause_s=0.1
    )
    with World(scheduler, 1, 1, "-rebuilt", supervision=policy, **ON_DEVICE) as world:
        for has_changed in (False, True):
            version = world.step()
            world.sync(ViaDevice(NO_LIMIT)).push()
            if has_changed:
                world.step()
            pid = world.pid(world.ids[0])
            os.kill(pid, KILL)
            expected = Health.STALE if has_changed else Health.HEALTHY
            wait_until(lambda: world.health() != [Health.HEALTHY], "its death is noticed")
            wait_until(functools.partial(is_in, world, expected), "it is rebuilt")
            assert world.pid(world.ids[0]) != pid
            if not has_changed:
                assert world.rollout.versions() == {world.ids[0]: version}
                assert not any(world.differing().values())


def test_roles_on_other_devices(scheduler: Scheduler) -> None:
    with World(scheduler, 1, 1, "-apart", **{**ON_DEVICE, "beside": False}) as world:
        told = r"rollout-apart/0 is on device \d of node .*; expected a trainer rank there"
        with pytest.raises(ValueError, match=told):
            world.sync(ViaDevice())
        world.step()
        assert world.sync().push().updated == world.ids
        assert not any(world.differing().values())
    with (
        make_scheduler("inline") as other,
        World(other, 1, 1) as alone,
        pytest.raises(ValueError, match="runs all workers in one; use ViaMemory"),
    ):
        alone.sync(ViaDevice())


def test_memory_that_cannot_be_shared(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """Of an engine without sockets."""
    with World(scheduler, 1, 1, "-unable", trainer="Socketless", **ON_DEVICE) as world:
        sync = world.sync()
        for _ in range(2):
            world.step()
            assert sync.push().updated == world.ids
            assert not any(world.differing().values())
        told = "to role rollout-unable by ViaMemory: .*Socketless has no open_weight_socket"
        assert len(re.findall(told, caplog.text)) == 1
