"""The rollout engine on vLLM: one instance per worker, whose EngineCore and ranks are child
processes of it.

It takes HFRolloutEngine's place by its name alone. vLLM's client lives on an event loop in a thread
of its own, so that calls may come from any loop or thread and health is answered beside them.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import msgspec

from helmsman.api.engines import InferenceEngine
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.weights import Weights
from helmsman.engines._serving.generation import check_level, check_samples_of_one
from helmsman.engines._vllm import internals
from helmsman.engines._vllm.instance import VLLMInstance
from helmsman.engines._weights.fit import vocab_size_of
from helmsman.engines.vllm_config import VLLMConfig

T = TypeVar("T")

_EXTENSION = "helmsman.engines._vllm.worker.VLLMWorkerExtension"
_LAST_TASKS_S = 5.0


class VLLMEngine(InferenceEngine):
    """A rollout instance that vLLM serves, on the devices that its worker sees.

    Args:
        config: The configuration; or give its fields as keyword arguments.

    Raises:
        ValueError: Unknown fields, or values of another type (msgspec.ValidationError).
        BackendNotInstalledError: vLLM is not installed.
    """

    def __init__(self, config: VLLMConfig | None = None, **fields: Any) -> None:
        if config is not None and fields:
            raise ValueError(
                f"give either a VLLMConfig or its fields, not both (fields: {', '.join(fields)})"
            )
        self.config = config if config is not None else msgspec.convert(fields, VLLMConfig)
        internals.require_vllm()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._instance: VLLMInstance | None = None
        self._calls: set[Future[Any]] = set()
        """Those under way, for destroy to see them answered before the loop ends."""
        self._destroyed = False

    def initialize(self) -> None:
        """Start vLLM's processes and load the model; the weights are version 0.

        vLLM inherits this worker's environment, its devices' masks included. It lets the system
        choose the ports on which its processes meet, so that instances of one node do not collide;
        VLLM_PORT, which makes all of them try the same, is best left unset.

        Raises:
            ValueError: There is no such folder, or vLLM does not know an argument.
            RuntimeError: The engine is running or was destroyed; or vLLM could not start, and its
                log says why.
        """
        if self._instance is not None or self._destroyed:
            raise RuntimeError(
                "initialize() was called on a rollout engine that is running or destroyed; make a "
                "new one"
            )
        if not os.path.isdir(self.config.model):
            raise ValueError(
                f"there is no model folder {self.config.model!r} on this worker; give a local "
                "folder"
            )
        internals.prepare_environment()
        arguments, vocab_size = _arguments(self.config), vocab_size_of(self.config.model)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=(loop,), name="helmsman-vllm", daemon=True)
        thread.start()
        self._loop, self._thread = loop, thread

        async def start() -> VLLMInstance:
            instance = VLLMInstance(self.config, vocab_size)
            try:
                await instance.start(arguments)
            except BaseException:
                await instance.close()
                raise
            return instance

        try:
            self._instance = asyncio.run_coroutine_threadsafe(start(), loop).result()
        except BaseException:
            self._end_loop()
            raise

    def failure(self) -> str | None:
        return self._instance.failure if self._instance is not None else None

    def destroy(self) -> None:
        """End all requests as aborted, and vLLM's processes: those that have not ended after
        ``close_timeout_s`` are killed. Idempotent.
        """
        self._destroyed = True
        instance, self._instance = self._instance, None
        if instance is None or self._loop is None:
            return
        late = threading.Timer(self.config.close_timeout_s, instance.kill)
        late.daemon = True
        late.start()
        try:
            asyncio.run_coroutine_threadsafe(instance.close(), self._loop).result()
            wait(tuple(self._calls), timeout=_LAST_TASKS_S)
        finally:
            late.cancel()
            instance.kill()
            self._end_loop()

    def _end_loop(self) -> None:
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _running(self) -> VLLMInstance:
        if self._instance is None:
            raise RuntimeError(
                "the rollout engine is not running; call initialize() first, and nothing after "
                "destroy()"
            )
        return self._instance

    def _begin(self, work: Callable[[VLLMInstance], Coroutine[Any, Any, T]]) -> Future[T]:
        instance, loop = self._running(), self._loop
        assert loop is not None
        call = asyncio.run_coroutine_threadsafe(work(instance), loop)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    async def _to_its_end(self, work: Callable[[VLLMInstance], Coroutine[Any, Any, T]]) -> T:
        """Await what must not be left half done when its caller is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self._begin(work)))

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        """See InferenceEngine. Cancelling the call ends the request in vLLM. Raises also
        EngineDeadError when vLLM's processes have ended.

        With a seed, the tokens do not depend on what else is in flight, up to rounding. A request
        that goes on after a cut (``num_generated``, or an update with ``in_flight='recompute'``)
        draws from a stream that follows from the seed and from the number of tokens so far: it
        repeats itself, but differs from an uncut one, since vLLM's own generators begin at their
        first number.
        """
        return (await self.agenerate_samples([request]))[0]

    async def agenerate_samples(
        self, requests: Sequence[GenerationRequest]
    ) -> list[GenerationResult]:
        """See InferenceEngine. Each sample keeps its own seed; vLLM's ``n`` would derive one from
        another. The prompt is computed once but for the last of its blocks (``block_size`` tokens),
        by way of the prefix cache.
        """
        check_samples_of_one(requests)
        return await asyncio.wrap_future(self._begin(lambda instance: instance.generate(requests)))

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        return await asyncio.wrap_future(
            self._begin(lambda instance: instance.requests.abort(request_ids))
        )

    def stats(self) -> dict[str, float]:
        """``num_running`` (those with a token) and ``num_waiting`` requests; ``num_prompt_tokens``
        computed and ``num_generated_tokens`` so far; ``num_prefix_tokens`` of prompts that were
        looked up in the prefix cache, and ``num_prefix_hits`` of them that were found;
        ``kv_cache_usage``, the part of the cache that requests have, 0 to 1, as of the last step;
        and the ``version``. Takes no lock.
        """
        return self._running().stats()

    async def update_weights(self, weights: Weights, version: int) -> int:
        """See InferenceEngine; for requests in flight, see VLLMConfig.in_flight. Weights in memory
        go to vLLM's processes by shared memory of this node, copied once; files are read by each
        rank; broadcasts are received by the first rank, on its device, and passed on to the
        others.
        """
        return await self._to_its_end(lambda instance: instance.update_weights(weights, version))

    def get_version(self) -> int:
        return self._running().requests.version

    async def sleep(self, level: int = 1) -> None:
        """See InferenceEngine. On devices this is vLLM's sleep mode, which ``enable_sleep_mode``
        prepares. On the CPU vLLM has none: requests are refused and the prefix cache is emptied, as
        elsewhere, but no memory is given back.
        """
        check_level(level)
        await self._to_its_end(lambda instance: instance.sleep(level))

    async def wake(self, *, weights_only: bool = False) -> None:
        await self._to_its_end(lambda instance: instance.wake(weights_only))

    async def load_lora(self, name: str, path: str) -> None:
        """Load a LoRA adapter in PEFT's layout from a folder, in place of one of this name. Needs
        ``max_lora_rank``.
        """
        if not self.config.max_lora_rank:
            raise ValueError(
                "this engine takes no LoRA adapters; set max_lora_rank to the largest of their "
                "ranks"
            )
        await self._to_its_end(lambda instance: instance.load_adapter(name, path))

    async def unload_lora(self, name: str) -> None:
        """Forget an adapter that requests do not use. Raises: ValueError for one that they do, or
        that is not there.
        """
        await self._to_its_end(lambda instance: instance.unload_adapter(name))

    async def use_lora(self, name: str = "") -> None:
        """Have requests that begin from now on use this adapter; '' for none. Raises: ValueError
        for one that is not loaded.
        """

        async def use(instance: VLLMInstance) -> None:
            instance.use_adapter(name)

        await self._to_its_end(use)


def _arguments(config: VLLMConfig) -> dict[str, Any]:
    from helmsman.engines._models.model import resolve_dtype

    arguments: dict[str, Any] = {
        "model": config.model,
        "skip_tokenizer_init": True,
        "dtype": str(resolve_dtype(config.dtype)).removeprefix("torch."),
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_concurrency,
        "seed": config.seed,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        "load_format": config.load_format,
        "enable_sleep_mode": config.enable_sleep_mode,
        "logprobs_mode": "raw_logprobs",
        "generation_config": "vllm",  # and not the folder's, which may set how tokens are drawn
        "worker_extension_cls": _EXTENSION,
        "disable_log_stats": True,
    }
    if config.distributed_executor_backend is not None:
        arguments["distributed_executor_backend"] = config.distributed_executor_backend
    if config.max_lora_rank:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": config.max_lora_rank,
            "max_loras": config.max_loras,
        }
    return arguments | config.engine_args


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        if left := asyncio.all_tasks(loop):  # whose callers would wait for ever
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=_LAST_TASKS_S))
    finally:
        loop.close()
