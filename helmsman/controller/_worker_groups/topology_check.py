"""Compares the coordinates that workers report with those that were computed for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from helmsman.api.errors import HelmsmanError, MethodNotFoundError, TopologyMismatchError
from helmsman.api.scheduler import Call
from helmsman.api.topology import AXES, RankInfo, Topology


async def compare_coordinates(
    cluster: str, engine: str | type[Any], topology: Topology, call: Callable[..., Awaitable[list[Any]]], limit_s: float
) -> None:
    """Ask the workers of a cluster for their coordinates, if their class has a method for that.

    Args:
        call: calls a method on workers, given its name, their calls by worker id and a limit in seconds.
    Raises: TopologyMismatchError; GroupCallError where workers do not answer.
    """
    if not (isinstance(engine, str) or hasattr(engine, "get_rank_info")):
        return
    calls = {f"{cluster}/{info.rank}": Call(rpc_meta={"broadcast": False}) for info in topology.ranks}
    try:
        told = await call("get_rank_info", calls, limit_s)
    except HelmsmanError as error:
        if not _is_missing_method(error):
            raise
        return
    differences = {
        worker_id: told_apart
        for worker_id, ours, theirs in zip(calls, topology.ranks, told, strict=True)
        if (told_apart := _difference(ours, theirs)) is not None
    }
    if differences:
        raise TopologyMismatchError(cluster=cluster, num_ranks=topology.world_size, differences=differences)


def _is_missing_method(error: HelmsmanError) -> bool:
    """Whether workers have no such method, and so nothing to report."""
    return isinstance(error, MethodNotFoundError) or isinstance(getattr(error, "first", None), MethodNotFoundError)


def _difference(ours: RankInfo, theirs: Any) -> tuple[str, str] | None:
    """(what was computed, what the worker says) where these differ in something that it says."""
    if theirs is None:
        return None
    if isinstance(theirs, Mapping):
        named = dict(theirs)
    else:
        names = ["rank", "world_size", *(f"{axis}_{what}" for axis in AXES for what in ("rank", "size"))]
        named = {name: getattr(theirs, name) for name in names if hasattr(theirs, name)}
    wrong = [name for name, value in named.items() if getattr(ours, name, None) != value]
    if not wrong:
        return None
    shown = [
        ", ".join(f"{name}={value}" for name, value in side)
        for side in ([(name, getattr(ours, name, "unknown")) for name in wrong], [(name, named[name]) for name in wrong])
    ]
    return shown[0], shown[1]
