"""A running vLLM: its requests, its pauses, and the watch over its processes. Everything here happens on one event loop.

A request is an attempt in vLLM, or several in a row: one that an update takes out goes on as another, with the tokens so far as
part of the prompt. What requests and updates need of each other:

- requests are admitted while the gate is open, and an update closes it;
- the version of a token is that of its arrival, so an update begins once all that was decoded has arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from helmsman.api.errors import EngineDeadError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.weight_states import WeightEvent, WeightState
from helmsman.api.weights import Weights
from helmsman.engines._vllm import versions
from helmsman.engines._vllm.request import Flight, seed_of
from helmsman.engines._vllm.transfer import VLLMTransfer
from helmsman.engines.vllm_config import VLLMConfig
from helmsman.engines.weights import PartialWeightUpdateError

T = TypeVar("T")

_LOOK_EVERY_S = 0.25


class VLLMInstance:
    """An AsyncLLM and what Helmsman asks of it. Made and used on one running event loop; ``start`` comes first."""

    def __init__(self, config: VLLMConfig) -> None:
        self.config = config
        self.version = 0
        self.failure: str | None = None
        """Why it can serve no more; None while it can."""
        self._llm: Any = None
        self._children: list[Any] = []
        self._flights: dict[str, Flight] = {}
        self._numbers = itertools.count()
        self._gate = asyncio.Event()
        self._turn = asyncio.Lock()
        """Of who changes weights, adapters or sleep."""
        self._transfer = VLLMTransfer(config.model, config.bucket_bytes)
        self._num_updates = 0
        self._is_frozen = False
        self.state = WeightState.AWAKE
        self._adapters: dict[str, Any] = {}
        self._adapter = config.adapter
        self._watch: asyncio.Task[None] | None = None
        self._died: asyncio.Event = asyncio.Event()
        self._cache_usage = 0.0
        self._num_prefilled = self._num_generated = self._num_looked_up = self._num_hit = 0

    # --- life -------------------------------------------------------------------------------------------------------------

    async def start(self, arguments: Mapping[str, Any]) -> None:
        """Start vLLM's processes and load the adapters."""
        self._llm = await versions.start(arguments, self._note_usage)
        self._children = versions.children_of(self._llm)
        self._freezes = versions.can_freeze(self._llm)
        if self.config.in_flight == "recompute":
            self._freezes = False
        elif self.config.in_flight == "keep" and not self._freezes:
            raise versions.UnsupportedVLLMError(
                "in_flight is 'keep', and the installed vLLM cannot freeze requests (its pause_generation takes no mode); "
                "install a later one, or leave in_flight out"
            )
        self._watch = asyncio.get_running_loop().create_task(self._look_after())
        for name, path in self.config.adapters.items():
            await self.load_adapter(name, path)
        self._gate.set()

    def _note_usage(self, usage: float) -> None:
        self._cache_usage = usage

    async def _look_after(self) -> None:
        while not self._llm.errored:  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(_LOOK_EVERY_S)
        self._fail()

    def _fail(self) -> None:
        """vLLM's processes have ended: so do all requests, and nothing is served any more."""
        if self.failure is not None:
            return
        ends = [f"{child.name} (pid {child.pid}) {_end_of(child)}" for child in self._children if not child.is_alive()]
        self.failure = f"vLLM's engine has ended: {', '.join(ends) or 'one of its workers is gone'}"
        self._died.set()
        for flight in self._flights.values():
            if flight.attempt is not None:
                flight.attempt.cancel()

    def _require_life(self) -> None:
        if self.failure is None and self._llm.errored:
            self._fail()
        if self.failure is not None:
            raise EngineDeadError(engine="VLLMEngine", reason=self.failure)

    async def _call(self, work: Awaitable[T]) -> T:
        """Await what vLLM does, whose answer would never come once its processes have ended."""
        working, dying = asyncio.ensure_future(work), asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait([working, dying], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self._require_life()
            return working.result()
        except versions.dead_error():
            self._fail()
            self._require_life()
            raise
        finally:
            working.cancel()
            dying.cancel()

    async def close(self) -> None:
        """End all requests as aborted and vLLM's processes; what else is under way ends with EngineDeadError."""
        if self._watch is not None:
            self._watch.cancel()
        self.failure = self.failure or "it was destroyed"
        await self._abort(list(self._flights.values()))
        self._died.set()
        if self._llm is not None:
            versions.shut_down(self._llm)
            await asyncio.sleep(0)  # what it has left for the loop to close

    def kill(self) -> None:
        """End vLLM's processes at once, from any thread. Its workers end when its core has."""
        for child in self._children:
            if child.is_alive():
                child.kill()

    # --- requests ---------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Continue a prompt that fits."""
        if request.request_id in self._flights:
            raise ValueError(f"the request id {request.request_id!r} is already in flight; ids are unique among those")
        self._require_life()
        if not self.state.has_cache:
            raise RuntimeError(f"request {request.request_id!r} came while the engine sleeps; wake it first")
        flight = self._flights[request.request_id] = Flight(request, self._adapters.get(self._adapter))
        try:
            return await self._serve(flight)
        finally:
            del self._flights[request.request_id]

    async def _serve(self, flight: Flight) -> GenerationResult:
        while flight.stop_reason is None:
            self._require_life()
            flight.attempt = asyncio.get_running_loop().create_task(self._attempt(flight))
            try:
                await asyncio.wait([flight.attempt])
            finally:
                flight.attempt.cancel()
            if flight.attempt.cancelled():
                continue  # aborted, taken out for an update, or vLLM has died
            try:
                flight.attempt.result()
            except versions.dead_error():
                self._fail()
        return flight.result()

    async def _attempt(self, flight: Flight) -> None:
        await self._gate.wait()
        request, num_before = flight.request, len(flight.tokens)
        prompt, sampling = [*request.prompt_ids, *flight.tokens], request.sampling
        params = versions.sampling_params(
            max_tokens=min(sampling.max_new_tokens - num_before, self.config.max_model_len - len(prompt)),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop_token_ids=sampling.stop_token_ids,
            seed=seed_of(sampling.seed, request.num_generated + num_before),
        )
        inputs: dict[str, Any] = {"prompt_token_ids": prompt}
        if not self.config.keep_prefix_cache:
            # What was computed before the last update, or by an adapter that had this one's name and folder, is not found.
            number = flight.adapter.lora_int_id if flight.adapter is not None else 0
            inputs["cache_salt"] = f"weights {self._num_updates} adapter {number}"
        is_first = True
        async with contextlib.aclosing(
            self._llm.generate(inputs, params, f"helmsman-{next(self._numbers)}", lora_request=flight.adapter)
        ) as outputs:
            async for output in outputs:
                if is_first:
                    is_first = False
                    self._count_prompt(len(prompt), output.num_cached_tokens or 0)
                num = len(flight.tokens)
                flight.take(output, self.version)
                self._num_generated += len(flight.tokens) - num
                if flight.stop_reason is not None:
                    return
        raise RuntimeError(f"vLLM ended request {request.request_id!r} without a reason")

    def _count_prompt(self, num_tokens: int, num_cached: int) -> None:
        self._num_prefilled += num_tokens - num_cached
        if self.config.enable_prefix_caching:
            self._num_looked_up += num_tokens
            self._num_hit += num_cached

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """End requests early; returns how many."""
        ids = list(self._flights) if request_ids is None else request_ids
        meant = [self._flights[id_] for id_ in dict.fromkeys(ids) if id_ in self._flights]
        meant = [flight for flight in meant if flight.stop_reason is None]
        await self._abort(meant)
        return len(meant)

    async def _abort(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            flight.stop_reason = flight.stop_reason or "abort"
        await self._take_out(flights)

    async def _take_out(self, flights: Sequence[Flight]) -> None:
        """Have vLLM forget these, with the tokens kept that have arrived."""
        attempts = [flight.attempt for flight in flights if flight.attempt is not None]
        for attempt in attempts:
            attempt.cancel()
        if attempts:
            await asyncio.wait(attempts)

    def stats(self) -> dict[str, float]:
        """See VLLMEngine.stats."""
        frozen = not self._gate.is_set()
        flights = list(self._flights.values())  # of another thread
        num = len(flights)
        num_running = min(sum(bool(each.tokens) for each in flights), self.config.max_concurrency)
        return {
            "num_running": 0 if frozen else num_running,
            "num_waiting": num if frozen else num - num_running,
            "num_prompt_tokens": self._num_prefilled,
            "num_generated_tokens": self._num_generated,
            "num_prefix_tokens": self._num_looked_up,
            "num_prefix_hits": self._num_hit,
            "kv_cache_usage": self._cache_usage if num else 0.0,
            "version": self.version,
        }

    # --- weights ----------------------------------------------------------------------------------------------------------

    async def update_weights(self, weights: Weights, version: int) -> int:
        """Exchange the weights while nothing is decoded."""
        async with self._turn:
            self._require_life()
            if not self.state.has_weight_memory:
                raise RuntimeError(
                    "the engine sleeps; wake it, with weights_only=True at least, before its weights are updated"
                )
            self._gate.clear()
            try:
                await self._stop_decoding()
                await self._transfer.carry(weights, self._on_all_ranks)
            except PartialWeightUpdateError:
                self._on(WeightEvent.TORN)
                raise
            else:
                self.version = version
                self._on(WeightEvent.UPDATED)
                self._num_updates += 1
            finally:
                await self._go_on()
            return version

    async def _stop_decoding(self) -> None:
        flights = list(self._flights.values())
        if self._freezes:
            if not self._is_frozen:
                await self._call(versions.freeze(self._llm, self.config.max_concurrency))
                self._is_frozen = True
            # What vLLM has begun by the old weights is looked up by their mark: those without a token lose nothing but that.
            flights = [flight for flight in flights if not flight.tokens]
        await self._take_out(flights)

    async def _go_on(self) -> None:
        """Decode again, where there is something to decode by."""
        if self.failure is not None or not self.state.serves:
            return
        if self._is_frozen:
            await self._call(versions.thaw(self._llm))
            self._is_frozen = False
        self._gate.set()

    async def _on_all_ranks(self, method: str, *args: Any) -> list[dict[str, Any]]:
        outcomes: list[dict[str, Any]] = await self._call(self._llm.collective_rpc(method, args=args))
        return outcomes

    # --- sleep ------------------------------------------------------------------------------------------------------------

    async def sleep(self, level: int) -> None:
        """See VLLMEngine.sleep."""
        async with self._turn:
            self._require_life()
            if self._flights:
                raise RuntimeError(
                    f"{len(self._flights)} requests are in flight; abort them, or let them end, before it sleeps"
                )
            if self.state.has_weight_memory:
                await self._fall_asleep(level)
            if level == 2:
                self._on(WeightEvent.DROPPED)

    async def _fall_asleep(self, level: int) -> None:
        if not versions.is_on_host() and not self.config.enable_sleep_mode:
            raise RuntimeError("sleep needs enable_sleep_mode=True, with which vLLM allocates so that it can")
        before = self.state
        self._gate.clear()
        self._on(WeightEvent.SLEPT)  # from here on requests are refused
        try:
            await self._call(self._llm.reset_prefix_cache() if versions.is_on_host() else self._llm.sleep(level))
        except BaseException:
            self.state = before
            await self._go_on()
            raise
        self._num_updates += 1  # the cache is gone

    async def wake(self, weights_only: bool) -> None:
        """See VLLMEngine.wake."""
        async with self._turn:
            self._require_life()
            if self.state.has_cache or (weights_only and self.state.has_weight_memory):
                return
            if not versions.is_on_host():
                tags = ["weights"] if weights_only else ["kv_cache"] if self.state.has_weight_memory else None
                await self._call(self._llm.wake_up(tags))
            self._on(WeightEvent.WOKE_WEIGHTS if weights_only else WeightEvent.WOKE)
            await self._go_on()

    def _on(self, event: WeightEvent) -> None:
        self.state = self.state.after(event)

    # --- adapters ---------------------------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str) -> None:
        """See VLLMEngine.load_lora."""
        async with self._turn:
            self._require_life()
            old = self._adapters.get(name)
            adapter = versions.lora_request(name, next(self._numbers) + 1, path)
            if not await self._call(self._llm.add_lora(adapter)):
                raise RuntimeError(f"vLLM did not take the adapter {name!r} of {path}; the worker's log says more")
            self._adapters[name] = adapter
            if old is not None:
                await self._call(self._llm.remove_lora(old.lora_int_id))

    async def unload_adapter(self, name: str) -> None:
        """See VLLMEngine.unload_lora."""
        async with self._turn:
            self._require_life()
            if name not in self._adapters:
                raise ValueError(_unknown_adapter(name, self._adapters))
            if name == self._adapter:
                raise ValueError(f"requests use the adapter {name!r}; use_lora another, or none, first")
            num_using = sum(flight.adapter is self._adapters[name] for flight in self._flights.values())
            if num_using:
                raise ValueError(f"{num_using} requests in flight use the adapter {name!r}; let them end, or abort them, first")
            await self._call(self._llm.remove_lora(self._adapters.pop(name).lora_int_id))

    def use_adapter(self, name: str) -> None:
        """See VLLMEngine.use_lora."""
        if name and name not in self._adapters:
            raise ValueError(_unknown_adapter(name, self._adapters))
        self._adapter = name


def _unknown_adapter(name: str, known: Mapping[str, Any]) -> str:
    return f"there is no adapter {name!r}; loaded are: {', '.join(known) or 'none'}"


def _end_of(child: Any) -> str:
    code = child.exitcode
    if code is None or code >= 0:
        return f"with exit code {code}"
    return f"by {signal.Signals(-code).name}"
