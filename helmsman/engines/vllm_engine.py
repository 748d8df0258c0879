"""Rollout engine on vLLM: one instance per worker; EngineCore and ranks are its child processes.

It is a drop-in replacement for HFRolloutEngine. vLLM's client runs on an event loop in its own
thread, so calls may come from any loop or thread, and health checks are answered concurrently.
"""

from __future__ import annotations

import asyncio
import copy
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from helmsman.api.engines import InferenceEngine
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.weights import Weights
from helmsman.api.workers import WorkerContext, worker_context
from helmsman.engines._models.engine_checks import config_from, require_new, running
from helmsman.engines._models.folders import read_config
from helmsman.engines._serving.generation import check_level, check_samples_of_one
from helmsman.engines._vllm import internals
from helmsman.engines._vllm.instance import VLLMInstance
from helmsman.engines._vllm.nodes import OtherNodes, instance_nodes, node_arguments
from helmsman.engines._weights.fit import vocab_size_of
from helmsman.engines._weights.model_folder import check_model_folder
from helmsman.engines.vllm_config import VLLMConfig

T = TypeVar("T")

_EXTENSION = "helmsman.engines._vllm.worker.VLLMWorkerExtension"
_LAST_TASKS_S = 5.0
_OF_FOLDERS = ("auto", "hf", "safetensors")
"""Load formats with which vLLM reads the files that the other engines read."""


class VLLMEngine(InferenceEngine):
    """A rollout instance served by vLLM, on the devices that its worker sees.

    Args:
        config: The configuration. Alternatively, pass its fields as keyword arguments.
        **fields: Fields of VLLMConfig; not allowed together with ``config``.

    Raises:
        ValueError: Both ``config`` and fields are given, a field is unknown, or a value has the
            wrong type (msgspec.ValidationError).
        BackendNotInstalledError: vLLM is not installed.
    """

    def __init__(self, config: VLLMConfig | None = None, **fields: Any) -> None:
        self.config = config_from(VLLMConfig, config, fields)
        internals.require_vllm()
        context = worker_context()
        self._worker = context or WorkerContext(worker_id="", node="")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._instance: VLLMInstance | None = None
        self._calls: set[Future[Any]] = set()
        """Calls in flight; destroy waits for them before it stops the loop."""
        self._destroyed = False

    def initialize(self) -> None:
        """Start vLLM's processes and load the model; the weights are version 0.

        vLLM inherits this worker's environment, including device visibility. The operating system
        chooses the ports of vLLM's processes, so instances on one node do not collide. Leave
        VLLM_PORT unset: it makes all of them try the same port.

        Where the worker's instance spans nodes (a deferred job of RayScheduler), each node runs the
        ranks of its own devices; the first ones are of this worker's node. The ranks meet at the
        worker's first leased port. Send weights by ViaDisk or ViaCollective there: memory reaches
        this worker's node only.

        Raises:
            ValueError: The folder does not exist or its files are not those of its model, vLLM
                rejects an argument, or the instance spans nodes and has not one rank for each of
                its devices.
            RuntimeError: The engine is running or was destroyed; the instance spans nodes and its
                worker has no leased port; or vLLM could not start, for the reason in its log.
        """
        require_new("rollout engine", is_used=self._instance is not None or self._destroyed)
        arguments = async_engine_arguments(self.config)
        if arguments["load_format"] in _OF_FOLDERS and "quantization" not in arguments:
            check_model_folder(self.config.model)
        else:
            read_config(self.config.model)
        internals.prepare_environment()
        addresses = self._span_nodes(arguments)
        vocab_size = vocab_size_of(self.config.model)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=(loop,), name="helmsman-vllm", daemon=True)
        thread.start()
        self._loop, self._thread = loop, thread

        async def start() -> VLLMInstance:
            others = None
            if addresses and self._worker.nodes is not None:
                others = OtherNodes(self._worker.nodes, arguments, addresses)
            instance = VLLMInstance(self.config, vocab_size, others)
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

    def beside(self) -> VLLMEngine:
        """Return the engine of another policy, with adapters and requests of its own.

        Raises:
            RuntimeError: This engine is not running.
            EngineDeadError: vLLM's processes have ended.
            ValueError: vLLM is asleep, has received a whole model, or has no room for the adapters
                of another policy.
        """
        other = copy.copy(self)
        other._instance = self._begin(lambda instance: instance.beside()).result()
        other._thread = None
        return other

    def _span_nodes(self, arguments: dict[str, Any]) -> list[str]:
        """Add the arguments of an instance on several nodes; return the nodes' addresses."""
        nodes = instance_nodes()
        spans = len(nodes) > 1 and self._worker.nodes is not None
        if not spans or self.config.distributed_executor_backend is not None:
            return []
        if not self._worker.ports:
            raise RuntimeError(
                f"an instance on {len(nodes)} nodes needs a leased port to connect its ranks, and "
                "its worker has none; set SchedulingSpec(port_count=1)"
            )
        num_ranks = arguments["tensor_parallel_size"] * arguments["pipeline_parallel_size"]
        arguments |= node_arguments(nodes, num_ranks, self._worker.ports[0])
        addresses = [address for address, _ in nodes]
        os.environ["VLLM_HOST_IP"] = addresses[0]
        return addresses

    def failure(self) -> str | None:
        """Return why vLLM can no longer serve, or None while it can."""
        return self._instance.failure if self._instance is not None else None

    def destroy(self) -> None:
        """End all requests as aborted and stop vLLM's processes. Idempotent.

        Processes that have not ended after ``close_timeout_s`` are killed.
        """
        self._destroyed = True
        instance, self._instance = self._instance, None
        if instance is None or self._loop is None or not self._loop.is_running():
            return
        if self._thread is None:  # a policy beside another
            asyncio.run_coroutine_threadsafe(instance.close(), self._loop).result()
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
        return running("rollout engine", self._instance)

    def _begin(self, work: Callable[[VLLMInstance], Coroutine[Any, Any, T]]) -> Future[T]:
        instance, loop = self._running(), self._loop
        assert loop is not None
        call = asyncio.run_coroutine_threadsafe(work(instance), loop)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    async def _to_its_end(self, work: Callable[[VLLMInstance], Coroutine[Any, Any, T]]) -> T:
        """Await work that must run to completion even if its caller is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self._begin(work)))

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        """Continue one prompt. Cancelling the call ends the request in vLLM.

        With a seed, the tokens do not depend on other requests in flight, up to rounding. A request
        that continues after an interruption (``num_generated``, or an update with
        ``in_flight='recompute'``) samples from a stream derived from the seed and the number of
        tokens so far. The result is reproducible, but differs from that of an uninterrupted
        request, because vLLM's generators restart at their first number.

        Raises:
            ValueError: The prompt is empty or too long, has tokens outside the vocabulary, or the
                request id is already in flight.
            RuntimeError: The engine is asleep or not running.
            EngineDeadError: vLLM's processes have ended.
        """
        return (await self.agenerate_samples([request]))[0]

    async def agenerate_samples(
        self, requests: Sequence[GenerationRequest]
    ) -> list[GenerationResult]:
        """Continue one prompt several times; the prefix cache computes the prompt once.

        Each sample keeps its own seed; vLLM's ``n`` would derive one from another. The last block
        of the prompt (``block_size`` tokens) is computed for every sample.

        Args:
            requests: Requests that differ only in id and seed.

        Returns:
            Results in the order of the requests, when all have ended.

        Raises:
            ValueError: The prompts differ, or a request is invalid; see agenerate.
            RuntimeError: The engine is asleep or not running.
            EngineDeadError: vLLM's processes have ended.
        """
        check_samples_of_one(requests)
        return await asyncio.wrap_future(self._begin(lambda instance: instance.generate(requests)))

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """End the given requests (None: all) with stop_reason 'abort'; return their number."""
        return await asyncio.wrap_future(self._begin(lambda instance: instance.abort(request_ids)))

    def stats(self) -> dict[str, float]:
        """Return counters of the engine. Takes no lock.

        Returns:
            ``num_running`` (requests with a token) and ``num_waiting`` requests;
            ``num_prompt_tokens`` computed and ``num_generated_tokens`` so far;
            ``num_prefix_tokens``, the prompt tokens looked up in the prefix cache, and
            ``num_prefix_hits``, those found; ``kv_cache_usage``, the used fraction of the cache (0
            to 1) as of the last step; and the weight ``version``.
        """
        return self._running().stats()

    async def update_weights(self, weights: Weights, version: int) -> int:
        """Load new weights and serve them as ``version``.

        VLLMConfig.in_flight determines the treatment of requests in flight. Weights in memory are
        copied once, into shared memory of this node for vLLM's processes. Each rank reads files.
        Broadcasts are received by the first rank, on its device, and passed on to the others.

        Args:
            weights: All parameters by Hugging Face name, of any dtype and device: in memory, as
                files, or received by broadcasts.
            version: Their version.

        Returns:
            The version served.

        Raises:
            ValueError: Names or shapes do not fit the model, which is unchanged.
            RuntimeError: The engine is asleep. Or the update failed half-way
                (PartialWeightUpdateError): the engine generates nothing until an update succeeds.
            ConnectionError: A member of the weight-sync group is missing or late.
            OSError: The files cannot be read, or shared memory has no room.
            EngineDeadError: vLLM's processes have ended.
        """
        return await self._to_its_end(lambda instance: instance.update_weights(weights, version))

    def get_version(self) -> int:
        """Return the weight version that is served."""
        return self._running().requests.version

    async def sleep(self, level: int = 1) -> None:
        """Release device memory by vLLM's sleep mode, which needs ``enable_sleep_mode``.

        On the CPU vLLM has no sleep mode: requests are refused and the prefix cache is emptied, but
        no memory is released.

        Args:
            level: 1 drops the cache and keeps the weights on the host; 2 drops the weights too.

        Raises:
            ValueError: The level is not 1 or 2.
            RuntimeError: Requests are in flight, or sleep mode is not enabled.
        """
        check_level(level)
        await self._to_its_end(lambda instance: instance.sleep(level))

    async def wake(self, *, weights_only: bool = False) -> None:
        """Allocate the device memory again.

        Args:
            weights_only: Restore only the weights, so that an update can be loaded; a second wake()
                without it allocates the cache.
        """
        await self._to_its_end(lambda instance: instance.wake(weights_only))

    async def load_lora(self, name: str, path: str) -> None:
        """Load a LoRA adapter, replacing a loaded one of the same name.

        Args:
            name: Name of the adapter.
            path: Folder in PEFT's layout.

        Raises:
            ValueError: ``max_lora_rank`` is 0.
            RuntimeError: vLLM did not load the adapter.
            EngineDeadError: vLLM's processes have ended.
        """
        if not self.config.max_lora_rank:
            raise ValueError(
                "this engine takes no LoRA adapters; set max_lora_rank to the largest of their "
                "ranks"
            )
        await self._to_its_end(lambda instance: instance.load_adapter(name, path))

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter that requests do not use.

        Raises:
            ValueError: The adapter is in use or not loaded.
        """
        await self._to_its_end(lambda instance: instance.unload_adapter(name))

    async def use_lora(self, name: str = "") -> None:
        """Set the adapter for requests that start from now on; '' for none.

        Raises:
            ValueError: The adapter is not loaded.
        """
        await self._to_its_end(lambda instance: instance.use_adapter(name))


def async_engine_arguments(config: VLLMConfig) -> dict[str, Any]:
    """Return the fields of vLLM's AsyncEngineArgs for a configuration."""
    from helmsman.engines._models.model import resolve_dtype

    arguments: dict[str, Any] = {
        "model": config.model,
        "skip_tokenizer_init": True,
        "dtype": str(resolve_dtype(config.dtype)).removeprefix("torch."),
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_concurrency,
        "stream_interval": config.stream_interval,
        "seed": config.seed,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        # "auto" would choose files of Mistral's layout, which other engines do not read.
        "load_format": "hf" if config.load_format == "auto" else config.load_format,
        "enable_sleep_mode": config.enable_sleep_mode,
        "logprobs_mode": "raw_logprobs",
        "generation_config": "vllm",  # the folder's may change sampling defaults
        "worker_extension_cls": _EXTENSION,
        "disable_log_stats": True,
    }
    if config.distributed_executor_backend is not None:
        arguments["distributed_executor_backend"] = config.distributed_executor_backend
    elif config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        # In a Ray placement group vLLM would choose "ray", which needs bundles of one device each.
        arguments["distributed_executor_backend"] = "mp"
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
        if left := asyncio.all_tasks(loop):  # their callers would wait forever
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=_LAST_TASKS_S))
    finally:
        loop.close()
