"""An engine of vLLM in this process with the model of its weights, and ways to update it."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from helmsman.api.generation import GenerationRequest, GenerationResult, SamplingParams
from helmsman.api.weights import CollectiveTarget, DeviceTarget, WeightFormat, WeightsOnDisk
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines._weights.sending import checksum_of
from helmsman.engines.server_engine import ServerEngine
from helmsman.engines.weight_transfer import publish
from tests.processes import command_of
from tests.vllm.vllm_models import differences, is_greedy, report, weights_of

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=32)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2], [100]]
WAIT_S = 120.0


class Served:
    """An engine, and the model of its last update."""

    def __init__(self, engine: Any, model: Any) -> None:
        self.engine, self.model = engine, model
        self._numbers = iter(range(10**9))

    def request(
        self, prompt: Sequence[int], sampling: SamplingParams = GREEDY, **fields: Any
    ) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"r{next(self._numbers)}",
            prompt_ids=list(prompt),
            sampling=sampling,
            **fields,
        )

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams = GREEDY
    ) -> list[GenerationResult]:
        return list(
            await asyncio.gather(
                *(self.engine.agenerate(self.request(prompt, sampling)) for prompt in prompts)
            )
        )

    async def begun(
        self, request: GenerationRequest, num: int = 5
    ) -> asyncio.Task[GenerationResult]:
        """Start a request, and wait for a number of tokens."""
        before = (await self.stats())["num_generated_tokens"]
        task = asyncio.ensure_future(self.engine.agenerate(request))
        async with asyncio.timeout(WAIT_S):
            while (await self.stats())["num_generated_tokens"] < before + num:
                assert not task.done(), task
                await asyncio.sleep(0.005)
        return task

    async def all_begun(
        self, requests: Sequence[GenerationRequest]
    ) -> list[asyncio.Task[GenerationResult]]:
        """Start requests, and wait until each has a token.

        Running requests advance together and deliver tokens in groups of 8, so 24 tokens per
        request are enough.
        """
        tasks = [asyncio.ensure_future(self.engine.agenerate(each)) for each in requests]
        before: float | None = None
        async with asyncio.timeout(WAIT_S):
            while True:
                stats = await self.stats()
                if before is None and stats["num_running"] >= len(tasks):
                    before = stats["num_generated_tokens"]
                elif before is not None and (
                    stats["num_generated_tokens"] >= before + 24 * len(tasks)
                ):
                    return tasks
                assert not any(task.done() for task in tasks), tasks
                await asyncio.sleep(0.005)

    async def stats(self) -> dict[str, float]:
        found = self.engine.stats()
        return await found if inspect.isawaitable(found) else found

    async def bring(self, model: Any, version: int) -> None:
        assert await self.engine.update_weights(weights_of(model), version) == version
        self.model = model


class OnOneLoop:
    """Runs a ServerEngine on one event loop, as a worker does, for callers on any."""

    def __init__(self, engine: ServerEngine) -> None:
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.engine, name)

        def begin(*args: Any, **kwargs: Any) -> Any:
            return asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(found(*args, **kwargs), self._loop)
            )

        return begin if inspect.iscoroutinefunction(found) else found


class Fatal(dict[str, torch.Tensor]):
    """Weights that kill the process EngineCore when they are read: first for checksums, then for
    shapes, then for the first bucket.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], at_look: int) -> None:
        super().__init__(tensors)
        self._looks_left = at_look

    def items(self) -> Any:
        self._looks_left -= 1
        if self._looks_left == 0:
            family = psutil.Process().children(recursive=True)
            next(each for each in family if "EngineCore" in command_of(each)).kill()
        return super().items()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - what it waits for happens in another thread
            await asyncio.sleep(0.005)


async def require_the_trainers(served: Served, what: str) -> None:
    prompts = [*PROMPTS, [1] * 300]
    results = await served.generate(prompts)
    assert all(
        is_greedy(served.model, prompt, each.token_ids)
        for prompt, each in zip(prompts, results, strict=True)
    ), what
    found = differences(served.model, prompts, results)
    report(what, found)
    assert found.max() < 1e-3
    assert {version for each in results for version in each.versions} == {
        served.engine.get_version()
    }


def written(model: Any, folder: Path, spoilt: str = "") -> WeightsOnDisk:
    """Write two files and an index with checksums, one of which may be wrong."""
    tensors = weights_of(model)
    names = list(tensors)
    files = {
        name: f"model-{1 + (names.index(name) >= len(names) // 2)}.safetensors" for name in names
    }
    checksums = {name: checksum_of(tensor) for name, tensor in tensors.items()}
    for file in sorted(set(files.values())):
        part = {name: tensors[name] + (name == spoilt) for name in names if files[name] == file}
        save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_bytes(
        msgspec.json.encode({"metadata": {"crc32": checksums}, "weight_map": files})
    )
    return WeightsOnDisk(str(folder))


async def broadcast(
    served: Served, model: Any, version: int, tensors: dict[str, torch.Tensor]
) -> None:
    """Send tensors in broadcasts with checksums, as a trainer of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = WeightGroup(torch.device("cpu"))
    try:
        await _broadcast_by(group, served, version, tensors)
    finally:
        group.close()
        dist.destroy_process_group()
    served.model = model


async def _broadcast_by(
    group: WeightGroup, served: Served, version: int, tensors: dict[str, torch.Tensor]
) -> None:
    place = CollectiveTarget(
        version=version,
        group_id=f"g{version}",
        address="127.0.0.1",
        port=group.open_store("127.0.0.1"),
        key="plain:secret",
        rank=0,
        world_size=2,
        timeout_s=WAIT_S,
    )
    form = WeightFormat(bucket_bytes=150_000, checksum=True)

    def send() -> Any:
        return publish(tensors, place, form, version=version, is_root=True, group=group)

    taking = asyncio.ensure_future(
        served.engine.update_weights(msgspec.structs.replace(place, rank=1), version)
    )
    sent, taken = await asyncio.gather(asyncio.to_thread(send), taking, return_exceptions=True)
    assert sent == sum(tensor.nbytes for tensor in tensors.values()), sent
    if isinstance(taken, BaseException):
        raise taken


async def hand_over(
    served: Served, model: Any, version: int, tensors: dict[str, torch.Tensor], num_sockets: int
) -> None:
    """Send tensors as trainer ranks with a socket each, all in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = [WeightGroup(torch.device("cpu")) for _ in range(num_sockets)]
    place = DeviceTarget(
        version=version,
        key="secret",
        sockets=tuple(group.open_socket() for group in groups),
        receivers=(("instance",),) * num_sockets,
        timeout_s=WAIT_S,
    )
    form = WeightFormat(bucket_bytes=150_000, checksum=True)

    def send(group: WeightGroup) -> Any:
        return publish(tensors, place, form, version=version, is_root=True, group=group)

    async def take() -> int:
        try:
            return await served.engine.update_weights(
                msgspec.structs.replace(place, receiver="instance"), version
            )
        finally:
            for group in groups:
                group.leave_out(msgspec.structs.replace(place, receiver="instance"))

    try:
        sending = [asyncio.to_thread(send, group) for group in groups]
        await asyncio.gather(take(), *sending)
    finally:
        for group in groups:
            group.close()
        dist.destroy_process_group()
    served.model = model
