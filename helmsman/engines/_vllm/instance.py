"""A running vLLM: its requests and pauses, and supervision of its processes.

All of it runs on one event loop, except kill().
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from helmsman.api.errors import EngineDeadError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.weight_states import WeightEvent, WeightState
from helmsman.api.weights import Weights
from helmsman.engines._serving.adapters import TrainedAdapters
from helmsman.engines._serving.requests import Attempt, Requests
from helmsman.engines._vllm import internals
from helmsman.engines._vllm.nodes import OtherNodes
from helmsman.engines._vllm.transfer import VLLMTransfer
from helmsman.engines.shared_base import SharedBase
from helmsman.engines.vllm_config import VLLMConfig
from helmsman.engines.weights import PartialWeightUpdateError, partial_update, require_base

T = TypeVar("T")

_LOOK_EVERY_S = 0.25


class VLLMInstance:
    """An AsyncLLM with requests, weight updates, sleep and adapters.

    Created and used on one running event loop; ``start`` comes first. ``others`` are its ranks on
    other nodes, which it ends.
    """

    def __init__(
        self, config: VLLMConfig, vocab_size: int | None, others: OtherNodes | None = None
    ) -> None:
        self.config = config
        self._others = others
        self.failure: str | None = None
        """Why vLLM can no longer serve; None while it can."""
        self._vocab_size = vocab_size
        self._base = SharedBase(self)
        self._llm: Any = None
        self._children: list[Any] = []
        self._lora_numbers = itertools.count(1)
        self._folder_numbers = itertools.count(1)
        self._one_change = asyncio.Lock()
        """Serializes changes of weights, adapters and sleep."""
        self._num_updates = 0
        self._freezes = config.in_flight != "recompute"
        self._is_frozen = False
        self.state = WeightState.AWAKE
        self._adapters: dict[str, Any] = {}
        self._adapter = config.adapter
        self._is_random = config.load_format == "dummy"
        """Whether the weights below adapters are neither those of the folder nor of an update."""
        self._folders = (
            tempfile.TemporaryDirectory(prefix="helmsman-adapters-")
            if config.max_lora_rank
            else None
        )
        self._watch: asyncio.Task[None] | None = None
        self._died: asyncio.Event = asyncio.Event()
        self._cache_usage = 0.0
        self._num_prefilled = self._num_looked_up = self._num_hit = 0
        self._open_policy()

    def _open_policy(self, name: str = "") -> None:
        self.requests = Requests(
            self._read,
            has_ended=lambda: self.failure is not None,
            max_model_len=self.config.max_model_len,
            vocab_size=self._vocab_size,
            policy=name,
        )
        self._transfer = VLLMTransfer(self.config.model, self.config.bucket_bytes, name)
        self._trained = TrainedAdapters(self.requests, self._unload_trained)
        """Used when no loaded adapter is chosen."""

    async def beside(self) -> VLLMInstance:
        """Return another policy on vLLM, with adapters and requests of its own.

        It is a copy with the same client and lock. Meanwhile the state of both does not change.
        """
        async with self._one_change:
            self._require_life()
            other: VLLMInstance = self._base.beside(self, self.config.max_loras)
            other._adapter, other._adapters = "", {}
            other._open_policy(f"-{next(self._lora_numbers)}")
            other._watch = asyncio.get_running_loop().create_task(other._look_after())
            return other

    # --- life -------------------------------------------------------------------------------------

    async def start(self, arguments: Mapping[str, Any]) -> None:
        try:
            self._llm = await internals.start(arguments, self._note_usage)
        except Exception as error:
            if self._others is not None and self._others.failure is not None:
                raise RuntimeError(self._others.failure) from error
            raise
        self._children = internals.children_of(self._llm)
        await self._llm.collective_rpc("helmsman_close_listeners")
        self._watch = asyncio.get_running_loop().create_task(self._look_after())
        for name, path in self.config.adapters.items():
            await self.load_adapter(name, path)

    def _note_usage(self, usage: float) -> None:
        self._cache_usage = usage

    async def _look_after(self) -> None:
        while not self._llm.errored:  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(_LOOK_EVERY_S)
        self._fail()
        await self.requests.notify()

    def _fail(self) -> None:
        """Record that vLLM's processes have ended, and end all requests."""
        if self.failure is not None:
            return
        if self._others is not None and self._others.failure is not None:
            self._end(self._others.failure)
            return
        ends = [
            f"{child.name} (pid {child.pid}) {_end_of(child)}"
            for child in self._children
            if not child.is_alive()
        ]
        self._end(f"vLLM's engine has ended: {', '.join(ends) or 'one of its workers has exited'}")

    def _end(self, failure: str) -> None:
        self.failure = failure
        self._died.set()
        self.requests.close_attempts(begun=True)

    def _require_life(self) -> None:
        if self.failure is None and self._llm.errored:
            self._fail()
        if self.failure is not None:
            raise EngineDeadError(engine="VLLMEngine", reason=self.failure)

    async def _call(self, work: Awaitable[T]) -> T:
        """Await vLLM's answer, or raise EngineDeadError once its processes have ended."""
        from vllm.v1.engine.exceptions import EngineDeadError as VLLMDeadError

        working, dying = asyncio.ensure_future(work), asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait([working, dying], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self._require_life()
            return working.result()
        except VLLMDeadError:
            self._fail()
            self._require_life()
            raise
        finally:
            working.cancel()
            dying.cancel()

    async def close(self) -> None:
        """End all requests as aborted, and vLLM's processes.

        Other calls in flight end with EngineDeadError.
        """
        if self._watch is not None:
            self._watch.cancel()
        if (first := self._base.leave(self)) is not None:
            await self._trained.end(first._trained)
            return
        self.failure = self.failure or "it was destroyed"
        await self.requests.abort(None)
        await self.requests.until_ended()
        self._died.set()
        if self._others is not None:
            self._others.close()
        if self._folders is not None:
            self._folders.cleanup()
        if self._llm is not None:
            self._llm.shutdown()
            await asyncio.sleep(0)  # let the loop run vLLM's close callbacks

    def kill(self) -> None:
        """Kill vLLM's processes, from any thread. Its workers exit when its core has exited."""
        for child in self._children:
            if child.is_alive():
                child.kill()

    # --- requests ---------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        self._require_life()
        if not self.state.has_cache:
            raise RuntimeError("a request arrived while the engine is asleep; call wake() first")
        if self._adapter:
            return await self.requests.generate(requests, self._adapters.get(self._adapter))
        return await self._trained.generate(requests)

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """End requests early (None: all) with all of their tokens; return how many were ended."""
        await internals.flush(self._llm, self.config.max_concurrency)
        return await self.requests.abort(request_ids)

    async def _read(self, attempt: Attempt) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError as VLLMDeadError

        self._require_life()
        try:
            await self._stream(attempt)
        except VLLMDeadError:
            self._fail()
            self._require_life()

    async def _stream(self, attempt: Attempt) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        (generation,) = attempt.generations
        prompt = generation.token_ids
        sampling = generation.request.sampling
        adapter = generation.adapter
        params = SamplingParams(
            n=1,
            max_tokens=generation.num_left,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            seed=generation.attempt_seed,
            logprobs=0,  # of the sampled token only
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        inputs: dict[str, Any] = {"prompt_token_ids": prompt}
        if not self.config.keep_prefix_cache:
            # The salt hides prefixes computed before the last update, or by an earlier adapter with
            # the same name and folder.
            number = adapter.lora_int_id if adapter is not None else 0
            inputs["cache_salt"] = f"weights {self._num_updates} adapter {number}"
        is_first = True
        async with contextlib.aclosing(
            self._llm.generate(inputs, params, attempt.request_id, lora_request=adapter)
        ) as outputs:
            async for output in outputs:
                if is_first:
                    is_first = False
                    self._count_prompt(len(prompt), output.num_cached_tokens or 0)
                part = output.outputs[0]
                tokens, reason = list(part.token_ids), part.finish_reason
                if reason not in (None, "stop", "length", "abort"):
                    raise RuntimeError(
                        f"vLLM ended request {attempt.request_id!r} with the finish reason "
                        f"{reason!r}; see the worker's log"
                    )
                logprobs = [
                    entry[token].logprob
                    for token, entry in zip(tokens, part.logprobs or (), strict=True)
                ]
                self.requests.take(attempt, 0, tokens, logprobs, reason)
                if reason is not None:
                    return
        raise RuntimeError(
            f"vLLM ended request {attempt.request_id!r} without a finish reason; "
            "see the worker's log"
        )

    def _count_prompt(self, num_tokens: int, num_cached: int) -> None:
        self._num_prefilled += num_tokens - num_cached
        if self.config.enable_prefix_caching:
            self._num_looked_up += num_tokens
            self._num_hit += num_cached

    def stats(self) -> dict[str, float]:
        generations = list(self.requests.generations.values())  # another thread may change it
        num = len(generations)
        num_running = min(
            sum(bool(each.tokens) for each in generations), self.config.max_concurrency
        )
        if self.requests.is_held:
            num_running = 0
        return {
            "num_running": num_running,
            "num_waiting": num - num_running,
            "num_prompt_tokens": self._num_prefilled,
            "num_generated_tokens": self.requests.num_generated_tokens,
            "num_prefix_tokens": self._num_looked_up,
            "num_prefix_hits": self._num_hit,
            "kv_cache_usage": self._cache_usage if num else 0.0,
            "version": self.requests.version,
        }

    # --- weights ----------------------------------------------------------------------------------

    async def update_weights(self, weights: Weights, version: int) -> int:
        async with self._one_change:
            self._require_life()
            if not self.state.has_weight_memory:
                raise RuntimeError(
                    "the engine is asleep; call wake(weights_only=True), or wake(), before its "
                    "weights are updated"
                )
            self.requests.hold()
            try:
                await self._stop_decoding()
                folder, is_shared = self._new_folder(version), len(self._base.policies) > 1
                if await self._transfer.carry(weights, self._on_all_ranks, folder, is_shared):
                    await self._take_adapter(folder, version)
                    return version
                self._base.change()
                if not self.state.is_whole:
                    await self._restore_adapters()
            except PartialWeightUpdateError:
                self._base.change()
                self._on(WeightEvent.TORN)
                raise
            else:
                self._on(WeightEvent.UPDATED)
                self._is_random = False
                self._num_updates += 1
                await self._trained.serve(None, version)
            finally:
                await self._go_on()
            return version

    def _new_folder(self, version: int) -> str:
        """Return a folder for an adapter; '' if this instance takes none.

        A version can come again, while requests use the folder that it had before.
        """
        if self._folders is None or self._others is not None:
            return ""
        name = f"{next(self._folder_numbers)}-version-{version}"
        return os.path.join(self._folders.name, name)

    async def _take_adapter(self, folder: str, version: int) -> None:
        """Use an adapter for new requests; those in flight end with the one they began with."""
        from vllm.lora.request import LoRARequest

        require_base(is_whole=self.state.is_whole, is_random=self._is_random)
        number = next(self._lora_numbers)
        adapter = LoRARequest(f"version {version}.{number}", number, folder)  # vLLM compares names
        await self._add_adapter(adapter)
        await self._trained.serve(adapter, version)

    async def _unload_trained(self, adapter: Any) -> None:
        await self._call(self._llm.remove_lora(adapter.lora_int_id))
        shutil.rmtree(adapter.lora_path, ignore_errors=True)

    async def _restore_adapters(self) -> None:
        """Load all adapters again, whose memory a sleep at level 2 has dropped."""
        if not self._adapters:
            return
        try:
            await self._transfer.forget_adapters(self._on_all_ranks)
            for adapter in self._adapters.values():
                await self._add_adapter(adapter)
        except EngineDeadError:
            raise
        except Exception as error:
            raise partial_update(error) from error

    async def _stop_decoding(self) -> None:
        if self._freezes and not self._is_frozen:
            await self._call(internals.freeze(self._llm, self.config.max_concurrency))
            self._is_frozen = True
        # Attempts without a token start again: their cache salt belongs to the old weights.
        self.requests.close_attempts(begun=not self._freezes)
        await self.requests.until_ended(closing=True)

    async def _go_on(self) -> None:
        """Resume decoding if the weights are complete and there is a cache."""
        if self.failure is not None or not self.state.is_serving:
            return
        if self._is_frozen:
            await self._call(self._llm.resume_generation())
            self._is_frozen = False
        await self.requests.release()

    async def _on_all_ranks(self, method: str, *args: Any) -> list[dict[str, Any]]:
        outcomes: list[dict[str, Any]] = await self._call(
            self._llm.collective_rpc(method, args=args)
        )
        return outcomes

    # --- sleep ------------------------------------------------------------------------------------

    async def sleep(self, level: int) -> None:
        async with self._one_change:
            self._require_life()
            self._base.require_alone("sleep()")
            if num := len(self.requests.generations):
                raise RuntimeError(
                    f"{num} requests are in flight; abort them, or let them end, before sleep()"
                )
            self._base.change()
            if self.state.has_weight_memory:
                await self._fall_asleep(level)
            if level == 2:
                self._on(WeightEvent.DROPPED)

    async def _fall_asleep(self, level: int) -> None:
        on_host = internals.is_on_host()
        if not on_host and not self.config.enable_sleep_mode:
            raise RuntimeError(
                "sleep needs enable_sleep_mode=True, so that vLLM can release its memory"
            )
        before = self.state
        self.requests.hold()
        self._on(WeightEvent.SLEPT)  # from here on requests are refused
        try:
            await self._call(self._llm.reset_prefix_cache() if on_host else self._llm.sleep(level))
        except BaseException:
            self.state = before
            await self._go_on()
            raise
        self._num_updates += 1  # the cache was dropped

    async def wake(self, weights_only: bool) -> None:
        async with self._one_change:
            self._require_life()
            if self.state.has_cache or (weights_only and self.state.has_weight_memory):
                return
            if not internals.is_on_host():
                tags = (
                    ["weights"]
                    if weights_only
                    else ["kv_cache"]
                    if self.state.has_weight_memory
                    else None
                )
                await self._call(self._llm.wake_up(tags))
            self._on(WeightEvent.WOKE_WEIGHTS if weights_only else WeightEvent.WOKE)
            await self._go_on()

    def _on(self, event: WeightEvent) -> None:
        self.state = self.state.after(event)

    # --- adapters ---------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str) -> None:
        from vllm.lora.request import LoRARequest

        async with self._one_change:
            self._require_life()
            old = self._adapters.get(name)
            adapter = LoRARequest(name, next(self._lora_numbers), path)
            await self._add_adapter(adapter)
            self._adapters[name] = adapter
            if old is not None:
                await self._call(self._llm.remove_lora(old.lora_int_id))

    async def _add_adapter(self, adapter: Any) -> None:
        if not await self._call(self._llm.add_lora(adapter)):
            raise RuntimeError(
                f"vLLM did not load the adapter {adapter.lora_name!r} from {adapter.lora_path}; "
                "see the worker's log"
            )

    async def unload_adapter(self, name: str) -> None:
        async with self._one_change:
            self._require_life()
            if name not in self._adapters:
                raise ValueError(_unknown_adapter(name, self._adapters))
            if name == self._adapter:
                raise ValueError(
                    f"the adapter {name!r} cannot be unloaded: new requests use it. Call use_lora "
                    "with another name, or with '' for no adapter, first"
                )
            num_using = sum(
                each.adapter is self._adapters[name] for each in self.requests.generations.values()
            )
            if num_using:
                raise ValueError(
                    f"{num_using} requests in flight use the adapter {name!r}; let them end, or "
                    "abort them, first"
                )
            await self._call(self._llm.remove_lora(self._adapters.pop(name).lora_int_id))

    async def use_adapter(self, name: str) -> None:
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
