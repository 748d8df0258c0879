"""Uses of vLLM beyond its public interface; written for vLLM 0.32 and tested with it on CPU.

Any vLLM that has these internals is accepted: ``probe`` looks for them by name.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from helmsman.api.extras import needed_by
from helmsman.api.suggestions import did_you_mean

INTERNALS = {
    "vllm": "AsyncEngineArgs.create_engine_config",
    "vllm.config": "set_current_vllm_config",
    "vllm.distributed.parallel_state": "get_world_group",
    "vllm.model_executor.model_loader.reload": "finalize_layerwise_reload "
    "initialize_layerwise_reload",
    "vllm.ray.ray_env": "get_env_vars_to_copy",
    "vllm.usage.usage_lib": "UsageContext.LLM_CLASS",
    "vllm.v1.engine.async_llm": "AsyncLLM.collective_rpc AsyncLLM.errored AsyncLLM.sleep "
    "AsyncLLM.pause_generation AsyncLLM.resume_generation AsyncLLM.wake_up",
    "vllm.v1.engine.exceptions": "EngineDeadError",
    "vllm.v1.engine.output_processor": "RequestState.make_request_output",
    "vllm.v1.executor.multiproc_executor": "MultiprocExecutor.start_worker_monitor",
    "vllm.v1.metrics.loggers": "StatLoggerBase.record",
}
"""Module of vLLM -> the names in it that this package uses."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # On the CPU, instances of one machine would all bind their threads to the same processors, and
    # each rank would need a NUMA node. The number of threads follows OMP_NUM_THREADS, which
    # follows SchedulingSpec.cpu.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM renames its processes with setproctitle, which would overwrite the environment that marks
    # them as children of their worker.
    "SPT_NOENV": "1",
    # NPUs: in its default layout of weights (FRACTAL_NZ), vllm-ascend refuses to wake from sleep.
    "VLLM_ASCEND_ENABLE_NZ": "0",
}
"""Variables for vLLM and its children, unless the user has set them."""

# On the CPU, a seeded request whose prompt is prefilled in chunks crashes EngineCore (0.32): "CPU
# Generator does not use offset". Without chunks, a step has room for the longest prompt.
_HOST_ARGUMENTS = {"enable_chunked_prefill": False}


PRIVATE = 0o077
"""Mask of the files and sockets of vLLM's processes: for this user only."""


class UnsupportedVLLMError(RuntimeError):
    """The installed vLLM lacks an internal that is used here."""


def require_vllm() -> None:
    """Raise BackendNotInstalledError without vLLM."""
    with needed_by("VLLMEngine", "vllm"):
        import vllm  # noqa: F401


def probe(internals: Mapping[str, str] = INTERNALS) -> None:
    """Raise UnsupportedVLLMError unless the installed vLLM has all of these internals."""
    pairs = [(module, name) for module, names in internals.items() for name in names.split()]
    for module, name in pairs:
        try:
            functools.reduce(getattr, name.split("."), importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            version = getattr(importlib.import_module("vllm"), "__version__", "of no version")
            raise UnsupportedVLLMError(
                f"the installed vLLM, {version}, lacks {module}.{name}, which VLLMEngine uses: "
                f"{error}. Install one that has it: pip install 'helmsman-rl[vllm]'"
            ) from error


def prepare_environment() -> None:
    """Set the environment variables that vLLM's processes inherit; the user's values are kept."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Forking a process that has threads, as a worker has, may deadlock the child.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def request_amx() -> None:
    """Ask the kernel to let this process use AMX, if the CPU has it.

    vLLM (0.32) computes bfloat16 by AMX without asking, which ends its workers by SIGILL.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def keep_base_rows() -> None:
    """Make vLLM compute requests without an adapter right beside requests with one, on the host.

    Their index, -1, selects the adapter of the last slot (0.32; vLLM #48421, open in 2026-11).
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def bgmv_shrink(
        inputs: torch.Tensor,
        a: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        *args: Any,
    ) -> None:
        shrink(inputs, a, output, indices, *args)
        output[indices < 0] = 0.0

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink


async def start(arguments: Mapping[str, Any], on_usage: Callable[[float], None]) -> Any:
    """Start an AsyncLLM on the running event loop, blocking it until vLLM's processes are ready.

    ``on_usage`` is called after steps with the used fraction of the cache, 0 to 1.

    Raises:
        ValueError: AsyncEngineArgs lacks an argument.
        UnsupportedVLLMError: The installed vLLM lacks a part that is used here.
        Exception: Any error of vLLM's start.
    """
    probe()
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Listener(StatLoggerBase):  # type: ignore[misc, unused-ignore]
        def __init__(self, *_: Any, **__: Any) -> None:
            return

        def record(self, scheduler_stats: Any = None, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                on_usage(float(scheduler_stats.kv_cache_usage))

        def log_engine_initialized(self) -> None:
            return

    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for name in arguments:
        if name not in known:
            raise ValueError(
                f"engine_args has {name!r}, which the installed vLLM's AsyncEngineArgs lacks; "
                f"{did_you_mean(name, known)}"
            )
    if is_on_host():
        arguments = {**_HOST_ARGUMENTS, **arguments}
    # vLLM's sockets and the file in which its ranks meet are in the temporary folder.
    before = os.umask(PRIVATE)
    try:
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments), stat_loggers=[Listener], usage_context=usage_context()
        )
    finally:
        os.umask(before)


def usage_context() -> Any:
    """Return the use for which vLLM chooses defaults: throughput, not latency.

    An embedded engine's default computes prompts in pieces of 2,048 tokens on any device.
    """
    from vllm.usage.usage_lib import UsageContext

    return UsageContext.LLM_CLASS


def is_on_host() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


async def freeze(llm: Any, max_outputs: int) -> None:
    """Stop decoding until ``resume_generation``.

    On return, the readers have received every decoded token, of at most ``max_outputs`` requests
    per step.
    """
    await llm.pause_generation(mode="keep", clear_cache=False)
    # vLLM's answer arrives on the same socket after the tokens, but is delivered at once, while the
    # tokens still pass through a queue and a task. That task yields at most once per output, so
    # this many turns of the loop are enough for all of them.
    while not llm.engine_core.outputs_queue.empty():  # noqa: ASYNC110 - it has no event for it
        await asyncio.sleep(0)
    for _ in range(max_outputs + 16):
        await asyncio.sleep(0)
    await flush(llm, max_outputs)


async def flush(llm: Any, max_outputs: int) -> None:
    """Deliver the tokens that vLLM holds back until there are ``stream_interval`` of them.

    On return, the readers of at most ``max_outputs`` requests have received them.
    """
    for state in llm.output_processor.request_states.values():
        tokens = state.detokenizer.output_token_ids[state.sent_tokens_offset :]
        if tokens and state.sent_tokens_offset:
            interval, state.stream_interval = state.stream_interval, 1
            state.queue.put(state.make_request_output(tokens, None, None, None))
            state.stream_interval = interval
            state.sent_tokens_offset += len(tokens)
    for _ in range(max_outputs + 16):
        await asyncio.sleep(0)


def environment_of_ranks() -> dict[str, str]:
    """Return the variables that the ranks on other nodes get from this process.

    They are those that vLLM itself passes on; VLLM_RAY_EXTRA_ENV_VARS_TO_COPY adds more.
    """
    from vllm.ray.ray_env import get_env_vars_to_copy

    names = get_env_vars_to_copy(exclude_vars={"VLLM_HOST_IP"}, additional_vars={*ENVIRONMENT})
    return {name: os.environ[name] for name in names if name in os.environ}


def run_ranks(arguments: Mapping[str, Any]) -> None:
    """Run the ranks of a node that is not the instance's first, until one of them ends.

    Raises:
        Exception: Any error of vLLM's start.
    """
    require_vllm()
    from vllm import AsyncEngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    if is_on_host():
        arguments = {**_HOST_ARGUMENTS, **arguments}
    config = AsyncEngineArgs(**arguments).create_engine_config(
        usage_context=usage_context(), headless=True
    )
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


def kill_cores() -> None:
    """Kill the EngineCore processes of this process, also while they start; from any thread."""
    for child in multiprocessing.active_children():
        if child.name.startswith("EngineCore"):
            child.kill()


def children_of(llm: Any) -> list[Any]:
    """Return the processes that vLLM has started directly: EngineCore, the parent of the ranks."""
    manager = getattr(getattr(llm.engine_core, "resources", None), "engine_manager", None)
    return list(getattr(manager, "processes", ()))


def pack_for_host(model: Any) -> None:
    """Repack the weights that vLLM leaves unpacked after an update on the CPU."""
    _pack_tied_heads(model)
    _pack_experts(model)


def _pack_experts(model: Any) -> None:
    """Repack unquantised experts: vLLM (0.32) packs them only when it builds their kernel."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _pack_tied_heads(model: Any) -> None:
    """Repack heads that share their weight with the embeddings.

    On the CPU a head multiplies by a packed copy of its weight. vLLM (0.32) repacks only layers
    that were loaded themselves, so the head of a tied model would keep its initial weights.
    """
    owners: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = getattr(layer, "_parameters", {}).get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(layer)
    for layer in (each for layers in owners.values() if len(layers) > 1 for each in layers):
        process = getattr(
            getattr(layer, "quant_method", None), "process_weights_after_loading", None
        )
        if process is not None:
            process(layer)
