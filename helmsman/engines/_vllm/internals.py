"""The sides of vLLM that are not its public interface, in one place. Written for 0.32, and run with
it on the CPU.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from helmsman.api.extras import needed_by
from helmsman.api.suggestions import did_you_mean

OLDEST = (0, 32)
"""The oldest vLLM that is supported, and the one that the tests are run with."""
_OLDEST_TEXT = ".".join(map(str, OLDEST))

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # On the CPU: instances of one machine would all bind their threads to the same processors, and
    # ranks need a NUMA node each. The number of threads follows OMP_NUM_THREADS, which follows
    # SchedulingSpec.cpu.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM names its processes by setproctitle, which would write over the environment that shows
    # whose children they are.
    "SPT_NOENV": "1",
}
"""Variables that vLLM and its children read, where the user has not set them."""


class UnsupportedVLLMError(RuntimeError):
    """The installed vLLM is too old, or has no longer what is relied on."""


def require_vllm() -> None:
    """Raises: BackendNotInstalledError; UnsupportedVLLMError for an early version."""
    with needed_by("VLLMEngine", "vllm"):
        import vllm
    text = str(getattr(vllm, "__version__", ""))
    found = re.match(r"(\d+)\.(\d+)", text)  # a source build has no number, and is tried
    if found and (int(found[1]), int(found[2])) < OLDEST:
        raise UnsupportedVLLMError(
            f"the installed vLLM is {text}; VLLMEngine supports {_OLDEST_TEXT} and later. Install "
            "one of "
            "these, such as by pip install 'helmsman[vllm]'"
        )


def prepare_environment() -> None:
    """Set variables of this process, of which vLLM's are children; the user's values stay."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Forking a process that has threads, as a worker has, may deadlock the child.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


async def start(arguments: Mapping[str, Any], on_usage: Callable[[float], None]) -> Any:
    """An AsyncLLM for the running event loop, which it blocks until vLLM's processes are ready;
    ``on_usage`` is called after steps with the part of the cache that is used, 0 to 1.

    Raises: ValueError for an argument that AsyncEngineArgs does not have, UnsupportedVLLMError, and
        what vLLM raises.
    """
    try:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import StatLoggerBase
    except ImportError as error:
        raise UnsupportedVLLMError(
            f"the installed vLLM lacks a part that VLLMEngine uses: {error}. It is tested with "
            f"vLLM {_OLDEST_TEXT}; install "
            "that, such as by pip install 'helmsman[vllm]'"
        ) from error

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
                f"engine_args has {name!r}, which the installed vLLM's AsyncEngineArgs has not; "
                f"{did_you_mean(name, known)}"
            )
    if is_on_host():
        # There EngineCore ends by a request with a seed whose prompt is computed in parts (0.32):
        # "CPU Generator does not use offset". Without parts, a step has room for the longest
        # prompt.
        arguments = {"enable_chunked_prefill": False, **arguments}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[Listener])


def is_on_host() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


async def freeze(llm: Any, max_outputs: int) -> None:
    """Decode nothing until ``resume_generation``. When this returns, the readers have every token
    that was decoded, of at most ``max_outputs`` requests in a step.
    """
    await llm.pause_generation(mode="keep", clear_cache=False)
    # vLLM's answer comes by the socket of the tokens, after them, and is given out at once while
    # they still go through a queue and a task. That task yields between two outputs at most, so
    # after so many turns it has done all of them.
    while not llm.engine_core.outputs_queue.empty():  # noqa: ASYNC110 - it has no event for it
        await asyncio.sleep(0)
    for _ in range(max_outputs + 16):
        await asyncio.sleep(0)


def children_of(llm: Any) -> list[Any]:
    """The processes that it has started itself: EngineCore, whose children the ranks are."""
    manager = getattr(getattr(llm.engine_core, "resources", None), "engine_manager", None)
    return list(getattr(manager, "processes", ()))


def pack_tied_heads(model: Any) -> None:
    """Pack heads again that share their weight with the embeddings.

    On the CPU a head multiplies by a packed copy, and vLLM makes a new one only of layers that were
    loaded themselves (0.32): the head of a tied model would keep the weights of its start.
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
