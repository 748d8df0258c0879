"""Simulated rollout instances and an event loop on a virtual clock that skips waiting time.

An instance takes as long on the loop's clock as a continuously batching engine: a decoding step of
``batch`` requests takes ``step_s + per_request_s * batch`` and gives each request one token. A
request first computes its prompt, except the part in the instance's prefix cache. Requests progress
uniformly between changes of the batch, so only the changes are events. This makes it possible to
simulate a thousand instances in seconds.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import selectors
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from helmsman.api.errors import InstanceLostError
from helmsman.api.generation import GenerationRequest, GenerationResult, StopReason

T = TypeVar("T")


class EngineModel(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of a simulated instance. Times are in seconds."""

    step_s: float = 0.02
    """Time of a decoding step with an empty batch, spent on reading the weights."""
    per_request_s: float = 0.00005
    """Time that each request of the batch adds to a step."""
    prefill_s: float = 0.00001
    """Time per prompt token that is not cached."""
    cached_tokens: int = 0
    """Capacity of the prefix cache in prompt tokens, in blocks of 64."""
    slowdown: float = 1.0
    """Factor by which a straggler is slower; 1 for a normal instance."""

    def rate(self, batch: int) -> float:
        """Return the tokens per second of each request in a batch of this size."""
        return 1.0 / ((self.step_s + self.per_request_s * batch) * self.slowdown)


_BLOCK = 64
_ROUNDING = 1e-6
"""Tolerance in tokens: progress is a sum of many floats."""
GENERATED = -1
"""Id of every generated token."""
Lengths = Callable[[GenerationRequest], int]
"""Function from a request to its total number of tokens; called once per attempt."""


def log_normal_lengths(seed: int, mean: float, sigma: float) -> Lengths:
    """Return long-tailed lengths, drawn from the seed and request id.

    Every policy therefore gets the same lengths.

    Args:
        seed: Seed of all lengths.
        mean: Mean length, in tokens.
        sigma: Standard deviation of the logarithm of the length.

    Returns:
        A function from a request to its length in tokens.
    """

    def length(request: GenerationRequest) -> int:
        drawn = random.Random(f"{seed} {request.request_id}").lognormvariate(0.0, sigma)
        return max(1, int(mean * drawn / math.exp(sigma * sigma / 2)))

    return length


class _Running:
    def __init__(self, request: GenerationRequest, num_tokens: int) -> None:
        self.request, self.num_tokens = request, num_tokens
        self.start: float | None = None
        """The instance's progress when this request's prompt was computed; None before."""
        self.weights: list[tuple[float, int]] = []
        """Pairs of a weight version and the progress from which it generated tokens."""
        self.done: asyncio.Future[GenerationResult] = asyncio.get_running_loop().create_future()

    def num_at(self, progress: float) -> int:
        return (
            0
            if self.start is None
            else max(0, min(int(progress - self.start + _ROUNDING), self.num_tokens))
        )

    def versions(self, num_tokens: int) -> list[int]:
        """Return the weight versions that finished each of the first tokens."""
        found: list[int] = []
        until = [self.num_at(progress) for progress, _ in self.weights[1:]]
        for (_, version), end in zip(self.weights, [*until, num_tokens], strict=True):
            found += [version] * (min(end, num_tokens) - len(found))
        return found


class SimulatedInstance:
    """One simulated engine.

    ``version`` may be set at any time; a token has the version with which it was finished.

    Args:
        instance_id: Id of the instance.
        model: Speed of the instance.
        lengths: Number of tokens of each request.
        version: Version of the initial weights.
    """

    def __init__(
        self, instance_id: str, model: EngineModel, lengths: Lengths, version: int = 0
    ) -> None:
        self.instance_id, self.model, self._version = instance_id, model, version
        self._lengths = lengths
        self._running: dict[str, _Running] = {}
        """Unfinished requests by id."""
        self._num_decoding = 0
        self._due: list[tuple[float, int, _Running]] = []
        """Heap by the progress at the last token; entries of finished requests are skipped."""
        self._numbers = itertools.count()
        self._progress = 0.0
        """Tokens of a request that had been decoding from the start."""
        self._since = asyncio.get_running_loop().time()
        self._timer: asyncio.TimerHandle | None = None
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._lost: str | None = None
        self.num_cached_tokens = self.num_prompt_tokens = self.num_new_tokens = 0

    @property
    def is_lost(self) -> bool:
        """Whether the instance was killed."""
        return self._lost is not None

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue a prompt.

        Args:
            request: The prompt and its sampling parameters.

        Returns:
            The generated tokens.

        Raises:
            InstanceLostError: The instance was killed before or during the request.
        """
        if self._lost is not None:
            raise InstanceLostError(
                instance_id=self.instance_id, reason=self._lost, may_have_begun=False
            )
        wanted = max(1, self._lengths(request) - request.num_generated)
        running = self._running[request.request_id] = _Running(
            request, min(wanted, request.sampling.max_new_tokens)
        )
        try:
            prefill_s = (
                self._prefill(request.prompt_ids) * self.model.prefill_s * self.model.slowdown
            )
            if prefill_s:
                await asyncio.wait([running.done], timeout=prefill_s)
            if not running.done.done():
                self._decode(running)
            return await running.done
        finally:
            self._advance()
            if self._running.get(request.request_id) is running:  # its id may be in use again
                del self._running[request.request_id]
            self._num_decoding -= running.start is not None
            self._plan()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with the tokens that they have so far; unknown ids are ignored."""
        self._advance()
        for request_id in request_ids:
            if (running := self._running.get(request_id)) is not None and not running.done.done():
                self._finish(running, running.num_at(self._progress))

    def kill(self, reason: str = "it was killed") -> None:
        """Fail all requests, now and later, with InstanceLostError."""
        self._lost = reason
        self._advance()
        for running in self._running.values():
            if not running.done.done():
                self.num_new_tokens += running.num_at(self._progress)
                lost = InstanceLostError(
                    instance_id=self.instance_id, reason=reason, may_have_begun=True
                )
                running.done.set_exception(lost)

    @property
    def version(self) -> int:
        """Version of the instance's weights."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._advance()
        self._version = version
        for running in self._running.values():
            if running.start is not None:
                running.weights.append((self._progress, version))

    def _decode(self, running: _Running) -> None:
        self._advance()
        running.start = self._progress
        running.weights.append((self._progress, self._version))
        self._num_decoding += 1
        heapq.heappush(
            self._due, (running.start + running.num_tokens, next(self._numbers), running)
        )
        self._plan()

    def _prefill(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens to compute; a cached block matches with its whole prefix."""
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
        if self._num_decoding:
            self._progress += (now - self._since) * self.model.rate(self._num_decoding)
        self._since = now

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._due and self._due[0][2].done.done():
            heapq.heappop(self._due)
        if self._due:
            wait_s = max(0.0, self._due[0][0] - self._progress) / self.model.rate(
                self._num_decoding
            )
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._advance()
        while self._due and self._due[0][0] <= self._progress + _ROUNDING:
            _, _, running = heapq.heappop(self._due)
            if not running.done.done():
                self._finish(running, running.num_tokens)
        self._plan()

    def _finish(self, running: _Running, num_tokens: int) -> None:
        stop_reason: StopReason = "stop"
        if num_tokens < running.num_tokens:
            stop_reason = "abort"
        elif num_tokens >= running.request.sampling.max_new_tokens:
            stop_reason = "length"
        self.num_new_tokens += num_tokens
        running.done.set_result(
            GenerationResult(
                request_id=running.request.request_id,
                token_ids=[GENERATED] * num_tokens,
                logprobs=[0.0] * num_tokens,
                versions=running.versions(num_tokens) if num_tokens else [],
                stop_reason=stop_reason,
            )
        )


class SimulatedBackend:
    """GenerateScheduler backend of simulated instances.

    Args:
        instances: The instances by id.
    """

    def __init__(self, instances: Mapping[str, SimulatedInstance]) -> None:
        self.instances = dict(instances)

    async def generate(self, instance_id: str, request: GenerationRequest) -> GenerationResult:
        """Generate on one instance.

        Args:
            instance_id: The instance.
            request: The request.

        Returns:
            The result, with as many tokens as the instance's ``lengths`` gives for the request.

        Raises:
            InstanceLostError: The instance was killed.
        """
        return await self.instances[instance_id].generate(request)

    async def generate_samples(
        self, instance_id: str, requests: Sequence[GenerationRequest]
    ) -> list[GenerationResult]:
        """Generate all requests on one instance; prompts computed together take as long as one.

        Args:
            instance_id: Id of the instance.
            requests: The requests, as samples of one prompt.

        Returns:
            The results, in the order of the requests.

        Raises:
            InstanceLostError: The instance was killed before or during a request.
        """
        return list(
            await asyncio.gather(*(self.generate(instance_id, request) for request in requests))
        )

    async def abort(self, instance_id: str, request_ids: Sequence[str]) -> None:
        """End requests with the tokens that they have so far.

        Args:
            instance_id: The instance.
            request_ids: Ids of its requests; unknown ids are ignored.
        """
        self.instances[instance_id].abort(request_ids)


# --- the clock ------------------------------------------------------------------------------------


class _JumpingSelector(selectors.DefaultSelector):
    """Advances the clock to the next timer instead of waiting; ready events are handled first."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            # No timer is pending: only a thread or a socket can wake the loop.
            return super().select(None)
        if not (ready := super().select(0)):
            # One float step beyond the timer: after some months asyncio's own tolerance is lost in
            # rounding, and the loop would wait forever for the clock to pass the timer.
            self.now = math.nextafter(self.now + timeout, math.inf)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop on a virtual clock that starts at 0."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._clock.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like ``asyncio.run``, on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
