"""Simulated rollout instances: they take the time that a continuously batching engine would take, on the loop's clock.

An instance decodes all its requests together. A step of ``batch`` requests takes ``step_s + per_request_s * batch`` and gives
each one token; a request first has its prompt computed, but for the part that the instance's prefix cache holds. Between two
changes of the batch all progress alike, so only the changes are events: a thousand instances are simulated in seconds.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from helmsman.api.errors import InstanceLostError
from helmsman.api.generation import GenerationRequest, GenerationResult


class EngineModel(msgspec.Struct, frozen=True, kw_only=True):
    """How fast an instance is. Times in seconds."""

    step_s: float = 0.02
    """A decoding step of an empty batch: reading the weights."""
    per_request_s: float = 0.00005
    """What each request of the batch adds to a step."""
    prefill_s: float = 0.00001
    """For each prompt token that is not cached."""
    cached_tokens: int = 0
    """Tokens of prompts that the prefix cache holds, in blocks of 64."""
    slowdown: float = 1.0
    """Of a straggler: so many times slower."""

    def rate(self, batch: int) -> float:
        """Tokens a second of each request in a batch."""
        return 1.0 / ((self.step_s + self.per_request_s * batch) * self.slowdown)


_BLOCK = 64
Lengths = Callable[[GenerationRequest], int]
"""How many tokens a request will have; asked once for each attempt."""


def log_normal_lengths(seed: int, mean: float, sigma: float) -> Lengths:
    """Lengths with a long tail: each request's is drawn from its id and the seed, so that every policy meets the same ones.

    Args:
        mean: of the lengths, in tokens.
        sigma: standard deviation of their logarithm.
    """

    def length(request: GenerationRequest) -> int:
        drawn = random.Random(f"{seed} {request.request_id}").lognormvariate(0.0, sigma)
        return max(1, int(mean * drawn / math.exp(sigma * sigma / 2)))

    return length


class _Running:
    def __init__(self, request: GenerationRequest, num_tokens: int, due: float, prefill_s: float) -> None:
        self.request, self.num_tokens = request, num_tokens
        self.due = due
        """Tokens that a request of the batch has had when this one has its last, counted from the instance's start."""
        self.prefill_s = prefill_s
        self.done: asyncio.Future[GenerationResult] = asyncio.get_running_loop().create_future()


class SimulatedInstance:
    """One engine.

    Args:
        version: of its weights, which every token bears.
    """

    def __init__(self, instance_id: str, model: EngineModel, lengths: Lengths, version: int = 0) -> None:
        self.instance_id, self.model, self.version = instance_id, model, version
        self._lengths = lengths
        self._running: dict[str, _Running] = {}
        self._due: list[tuple[float, int, _Running]] = []
        """A heap; those that have ended are passed over."""
        self._numbers = itertools.count()
        self._progress = 0.0
        """Tokens that a request which had been here all the time would have."""
        self._since = asyncio.get_running_loop().time()
        self._timer: asyncio.TimerHandle | None = None
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._lost: str | None = None
        self.num_cached_tokens = self.num_prompt_tokens = self.num_new_tokens = 0

    @property
    def is_lost(self) -> bool:
        """Whether it has died."""
        return self._lost is not None

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue a prompt. Raises InstanceLostError when it has died, or dies meanwhile."""
        if self._lost is not None:
            raise InstanceLostError(instance_id=self.instance_id, reason=self._lost, may_have_begun=False)
        prefill_s = self._prefill(request.prompt_ids) * self.model.prefill_s * self.model.slowdown
        if prefill_s:
            await asyncio.sleep(prefill_s)
            if self._lost is not None:
                raise InstanceLostError(instance_id=self.instance_id, reason=self._lost, may_have_begun=True)
        self._advance()
        num_tokens = min(self._lengths(request), request.sampling.max_new_tokens)
        running = _Running(request, num_tokens, self._progress + num_tokens, prefill_s)
        self._running[request.request_id] = running
        heapq.heappush(self._due, (running.due, next(self._numbers), running))
        self._plan()
        try:
            return await running.done
        finally:
            self._advance()
            self._running.pop(request.request_id, None)
            self._plan()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these early, with what they have."""
        self._advance()
        for request_id in request_ids:
            if (running := self._running.get(request_id)) is not None and not running.done.done():
                self._finish(running, self._had(running), aborted=True)

    def kill(self, reason: str = "it was killed") -> None:
        """Die, with all that it has."""
        self._lost = reason
        self._advance()
        for running in self._running.values():
            if not running.done.done():
                self.num_new_tokens += self._had(running)
                lost = InstanceLostError(instance_id=self.instance_id, reason=reason, may_have_begun=True)
                running.done.set_exception(lost)

    def _had(self, running: _Running) -> int:
        """Tokens that a request has had so far."""
        return max(0, min(int(running.num_tokens - (running.due - self._progress)), running.num_tokens))

    def _prefill(self, tokens: Sequence[int]) -> int:
        """Tokens to compute; the rest is cached. Blocks are known by all that comes before them."""
        self.num_prompt_tokens += len(tokens)
        if not self.model.cached_tokens:
            return len(tokens)
        cached, digest, matching = 0, 0, True
        for start in range(0, len(tokens) - _BLOCK + 1, _BLOCK):
            digest = hash((digest, *tokens[start : start + _BLOCK]))
            matching = matching and digest in self._cache
            cached += _BLOCK if matching else 0
            self._cache[digest] = None
            self._cache.move_to_end(digest)
        while len(self._cache) * _BLOCK > self.model.cached_tokens:
            self._cache.popitem(last=False)
        self.num_cached_tokens += cached
        return len(tokens) - cached

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._running:
            self._progress += (now - self._since) * self.model.rate(len(self._running))
        self._since = now

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._due and self._due[0][2].done.done():
            heapq.heappop(self._due)
        if self._due:
            wait_s = max(0.0, self._due[0][0] - self._progress) / self.model.rate(len(self._running))
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._advance()
        while self._due and self._due[0][0] <= self._progress + 1e-6:
            _, _, running = heapq.heappop(self._due)
            if not running.done.done():
                self._finish(running, running.num_tokens, aborted=False)
        self._plan()

    def _finish(self, running: _Running, num_tokens: int, *, aborted: bool) -> None:
        limit = running.request.sampling.max_new_tokens
        self.num_new_tokens += num_tokens
        running.done.set_result(
            GenerationResult(
                request_id=running.request.request_id,
                token_ids=[0] * num_tokens,
                logprobs=[0.0] * num_tokens,
                versions=[self.version] * num_tokens,
                stop_reason="abort" if aborted else "length" if num_tokens >= limit else "stop",
            )
        )


class SimulatedBackend:
    """Instances as a GenerateScheduler's backend."""

    def __init__(self, instances: Mapping[str, SimulatedInstance]) -> None:
        self.instances = dict(instances)

    async def generate(self, instance_id: str, request: GenerationRequest) -> GenerationResult:
        """See Backend."""
        return await self.instances[instance_id].generate(request)

    async def abort(self, instance_id: str, request_ids: Sequence[str]) -> None:
        """See Backend."""
        self.instances[instance_id].abort(request_ids)
