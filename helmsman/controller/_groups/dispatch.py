"""Dispatch of group-call arguments to ranks, and collection of their results.

Pure functions. Each argument becomes a few parts and, for each rank, the index of its part, so
that a value sent to many ranks is packed once.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from helmsman.api.batch import Batch
from helmsman.api.columns import Ragged, concat_columns, kind_of
from helmsman.api.dispatch import (
    AxisSharding,
    Collect,
    CustomDispatch,
    Dispatch,
    Execute,
    MethodSpec,
    Replicate,
    Shard,
    Unregistered,
)
from helmsman.api.errors import DispatchError, UnevenBatchError
from helmsman.api.parts import Remainder, part_sizes
from helmsman.api.remote_batch import Piece, RemoteBatch
from helmsman.api.scheduler import ResultHandle, Scheduler
from helmsman.api.topology import AXES, Axis, Topology


class Argument(msgspec.Struct, frozen=True):
    """One argument of a group call, as parts and the part of each rank."""

    parts: Sequence[Any]
    of_rank: Sequence[int | None]
    """Index of each rank's part; None for a rank that gets None instead of a part."""
    starts: Sequence[int] = ()
    """Index of each part's first row in the caller's value; empty if no rows were split."""

    def for_rank(self, rank: int) -> Any:
        part = self.of_rank[rank]
        return None if part is None else self.parts[part]


class Cut(msgspec.Struct, frozen=True):
    """The parts into which the rows of a call were split."""

    sizes: Sequence[int]
    """Rows of each part, padding included."""
    padding: Sequence[int]
    """Number of padding rows at the end of each part."""


class Dispatched(msgspec.Struct, frozen=True):
    """The dispatched arguments of a call, and the ranks that are called."""

    args: Sequence[Argument]
    kwargs: Mapping[str, Argument]
    ranks: Sequence[int]
    cut: Cut | None = None
    """None if no rows were split."""


def dispatch(
    topology: Topology, spec: MethodSpec, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Dispatched:
    """Dispatch the arguments of a method.

    Raises:
        TypeError: The arguments do not match the method's signature.
        DispatchError: An argument does not fit the method's dispatch mode.
        UnevenBatchError: The rows do not divide evenly over the parts.
    """
    if isinstance(spec.dispatch_mode, Unregistered):
        return _unregistered(topology, spec.full_name, args, kwargs, spec.dispatch_mode.ranks)
    bound = _bind(spec, args, kwargs)
    world = range(topology.world_size)

    def unmarked(what: str, value: Any) -> Argument:
        if isinstance(value, (Shard, Replicate)):
            raise DispatchError(
                method=spec.full_name,
                reason=f"{what} is a {type(value).__name__}, but the method's declaration says how "
                f"its arguments are dispatched: {spec.mode_shown}",
                step="Give the value itself, or call execute_all_sync, which ignores declarations",
            )
        return _same_for_all(topology, value)

    def entry_for_each_rank(what: str, value: Any) -> Argument:
        if not isinstance(value, (list, tuple)) or len(value) != len(world):
            found = (
                f"{len(value)} of them"
                if isinstance(value, (list, tuple))
                else f"a {type(value).__qualname__}"
            )
            raise DispatchError(
                method=spec.full_name,
                reason=f"{what} of an ALL_TO_ALL call must be a list or tuple with an entry for "
                f"each of {len(world)} ranks; got {found}",
                step="Give one entry for each rank, or declare another mode",
            )
        return _by_identity(value)

    ranks = [0] if spec.execute_mode is Execute.RANK_ZERO else world
    replicated = _each(unmarked, args, kwargs, ranks)
    if spec.sharding is not None:
        return _cut(topology, spec, spec.sharding, bound)
    if spec.dispatch_mode is Dispatch.ALL_TO_ALL:
        return _each(entry_for_each_rank, args, kwargs, ranks)
    if isinstance(spec.dispatch_mode, CustomDispatch):
        return _custom(topology, spec, spec.dispatch_mode, args, kwargs, ranks)
    return replicated


def _unregistered(
    topology: Topology,
    method: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ranks: Sequence[int],
) -> Dispatched:
    """Dispatch arguments marked by Shard(x) or Replicate(x); unmarked ones are replicated."""

    def one(what: str, value: Any) -> Argument:
        if isinstance(value, Shard):
            if len(ranks) == 1 and topology.num_parts(value.sharding.shard) > 1:
                raise DispatchError(
                    method=method,
                    reason=f"{what} is a Shard, and the call goes to rank {ranks[0]} alone, so "
                    "the other shares would be lost",
                    step="Give that rank its rows directly",
                )
            return _shares(topology, method, what, value.sharding, value.value, value.remainder)[0]
        return _same_for_all(topology, value.value if isinstance(value, Replicate) else value)

    return _each(one, args, kwargs, ranks)


def _each(
    one: Callable[[str, Any], Argument],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ranks: Sequence[int],
) -> Dispatched:
    return Dispatched(
        [one(f"argument {index}", value) for index, value in enumerate(args)],
        {name: one(f"argument {name!r}", value) for name, value in kwargs.items()},
        ranks,
    )


def collecting_ranks(topology: Topology, sharding: AxisSharding) -> list[int]:
    """Ranks whose results are collected, one for each part, in the order of the parts.

    Raises:
        DispatchError: A ``take`` coordinate is beyond the size of its axis.
    """
    wanted = {
        axis: _coordinate(topology, "taken from", sharding.take, axis)
        for axis in AXES
        if axis not in sharding.shard
    }
    found = [
        info.rank
        for info in topology.ranks
        if all(info.along(axis) == coordinate for axis, coordinate in wanted.items())
    ]
    return sorted(found, key=lambda rank: topology.part_of(rank, sharding.shard))


def _coordinate(topology: Topology, what: str, named: Mapping[Axis, int], axis: Axis) -> int:
    size, coordinate = topology.sizes[axis], named.get(axis, 0)
    if not -size <= coordinate < size:
        raise DispatchError(
            method="AxisSharding",
            reason=f"rows are {what} coordinate {coordinate} of {axis}, which has size {size}",
            step=f"Use a coordinate from 0 to {size - 1}, or -1 for the last",
        )
    return coordinate % size


def answering_ranks(topology: Topology, spec: MethodSpec, called: Sequence[int]) -> list[int]:
    """Ranks among ``called`` whose results are collected, in collection order."""
    if spec.sharding is not None and not spec.collects_all:
        return collecting_ranks(topology, spec.sharding)
    if spec.dispatch_mode is Dispatch.ONE_TO_ALL_ONE:
        return [0]
    return list(called)


def collect(
    topology: Topology,
    spec: MethodSpec,
    cut: Cut | None,
    results: list[Any],
    concat: Callable[[Sequence[Batch]], Batch] = Batch.concat,
) -> Any:
    """Combine the results of ``answering_ranks``, given in that order; ``concat`` joins batches.

    Raises:
        DispatchError: The results cannot be joined, or their padding rows cannot be identified.
    """
    if isinstance(spec.dispatch_mode, CustomDispatch):
        return spec.dispatch_mode.collect_fn(topology, results)
    if spec.execute_mode is Execute.RANK_ZERO or spec.dispatch_mode is Dispatch.ONE_TO_ALL_ONE:
        return results[0]
    if spec.sharding is None or spec.collects_all or spec.collect is Collect.LIST:
        return results
    if not isinstance(spec.collect, Collect) and spec.collect is not None:
        return spec.collect(results)
    if not any(map(_has_rows, results)) and any(result is not None for result in results):
        return results
    if cut is not None and any(cut.padding):
        results = [
            _unpadded(spec.full_name, *each)
            for each in zip(results, cut.sizes, cut.padding, strict=True)
        ]
    return _join_rows(spec.full_name, results, concat)


def _join_rows(
    method: str, results: Sequence[Any], concat: Callable[[Sequence[Batch]], Batch]
) -> Any:
    """Concatenate the rows of all parts; None if every part is None."""
    if all(result is None for result in results):
        return None
    kinds = list(dict.fromkeys(map(_kind_shown, results)))
    if len(kinds) > 1 or not is_joinable(results[0]):
        raise DispatchError(
            method=method,
            reason=f"its parts returned {' and '.join(kinds)}, which cannot be joined",
            step="Return a Batch, tensor, array, Ragged or list from each, or declare "
            "collect=Collect.LIST",
        )
    try:
        return concat(results) if isinstance(results[0], Batch) else concat_columns(results)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DispatchError(
            method=method,
            reason=f"the results of its parts cannot be joined: {error}",
            step="Return the same columns, dtypes and row shapes from each, or declare "
            "collect=Collect.LIST",
        ) from error


def collect_kept(
    scheduler: Scheduler, topology: Topology, spec: MethodSpec, cut: Cut | None, handles: list[Any]
) -> Any:
    """Join batches kept in the workers to one RemoteBatch; return other results as handles."""
    if spec.collect is not Collect.JOIN:
        return collect(topology, spec, cut, handles)
    if not any(map(_is_remote_batch, handles)):
        return handles
    batches = [
        RemoteBatch(scheduler, [Piece(each, 0, each.length or 0)], each.num_padding)
        if _is_remote_batch(each)
        else each
        for each in handles
    ]
    return collect(topology, spec, cut, batches, RemoteBatch.join)


def _is_remote_batch(result: Any) -> bool:
    return isinstance(result, ResultHandle) and result.type_name == Batch.__name__


def is_joinable(value: Any) -> bool:
    """Return whether the value is of a kind that can be split and joined by rows."""
    return isinstance(value, Batch) or bool(kind_of(value))


def _has_rows(value: Any) -> bool:
    """Return whether a result is a sequence of rows, joinable or not."""
    if isinstance(value, (str, bytes, Mapping)) and not is_joinable(value):
        return False
    try:
        return len(value) >= 0
    except TypeError:  # a number, None, a tensor without axes
        return False


# --- splitting and joining rows -------------------------------------------------------------------


def _bind(
    spec: MethodSpec, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments | None:
    if spec.signature is None:
        return None
    try:
        return spec.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{spec.full_name}{spec.signature}: {error}") from None


def _same_for_all(topology: Topology, value: Any) -> Argument:
    return Argument([value], [0] * topology.world_size)


def _custom(
    topology: Topology,
    spec: MethodSpec,
    mode: CustomDispatch,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ranks: Sequence[int],
) -> Dispatched:
    made: Any = mode.dispatch_fn(topology, *args, **kwargs)
    well_made = (
        isinstance(made, tuple)
        and len(made) == 2
        and isinstance(made[0], Sequence)
        and isinstance(made[1], Mapping)
    )
    entries = [*made[0], *made[1].values()] if well_made else []
    wrong = [
        entry
        for entry in entries
        if not isinstance(entry, Sequence)
        or isinstance(entry, (str, bytes))
        or len(entry) != topology.world_size
    ]
    if not well_made or wrong:
        raise DispatchError(
            method=spec.full_name,
            reason=f"its dispatch_fn returned {_shape(made)}, expected (args, kwargs) whose "
            f"entries are sequences with a value for each of the {topology.world_size} ranks",
            step="Correct the function",
        )
    return _each(lambda _, entry: _by_identity(entry), made[0], made[1], ranks)


def _by_identity(values: Sequence[Any]) -> Argument:
    """Make one part of each distinct object, by identity."""
    numbers: dict[int, int] = {}
    parts: list[Any] = []
    held = list(values)  # indexing a range creates a new object each time
    for value in held:
        if id(value) not in numbers:
            numbers[id(value)] = len(parts)
            parts.append(value)
    return Argument(parts, [numbers[id(value)] for value in held])


def _shape(made: Any) -> str:
    if not isinstance(made, tuple):
        return f"a {type(made).__qualname__}"
    return f"a tuple of {', '.join(type(each).__qualname__ for each in made) or 'nothing'}"


def _cut(
    topology: Topology,
    spec: MethodSpec,
    sharding: AxisSharding,
    bound: inspect.BoundArguments | None,
) -> Dispatched:
    assert bound is not None and spec.signature is not None
    cuts: dict[str, Cut] = {}

    def one(name: str, value: Any) -> Argument:
        if value is None or (
            spec.shard is not None and name.partition("[")[0].lstrip("*") not in spec.shard
        ):
            return _same_for_all(topology, value)
        argument, cuts[name] = _shares(
            topology, spec.full_name, f"argument {name!r}", sharding, value, spec.remainder
        )
        return argument

    positional: list[Argument] = []
    named: dict[str, Argument] = {}
    for name, value in bound.arguments.items():
        kind = spec.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            positional += [one(f"*{name}[{index}]", each) for index, each in enumerate(value)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named |= {key: one(f"**{name}[{key}]", each) for key, each in value.items()}
        elif kind is inspect.Parameter.KEYWORD_ONLY:
            named[name] = one(name, value)
        else:
            positional.append(one(name, value))
    rows = {name: sum(cut.sizes) - sum(cut.padding) for name, cut in cuts.items()}
    if len(set(rows.values())) > 1:
        shown = ", ".join(f"{name}: {count}" for name, count in rows.items())
        raise DispatchError(
            method=spec.full_name,
            reason=f"the split arguments must have equal numbers of rows; got {shown}",
            step="Give equal numbers of rows, or name the arguments to split in shard=(...)",
        )
    return Dispatched(
        positional, named, range(topology.world_size), next(iter(cuts.values()), None)
    )


def _shares(
    topology: Topology,
    method: str,
    what: str,
    sharding: AxisSharding,
    value: Any,
    remainder: Remainder,
) -> tuple[Argument, Cut]:
    num_parts = topology.num_parts(sharding.shard)
    if isinstance(value, tuple):
        value = list(value)
    if not is_joinable(value):
        raise DispatchError(
            method=method,
            reason=f"{what} is split over {', '.join(sharding.shard) or 'no axis'}, but a "
            f"{type(value).__qualname__} has no rows",
            step="Pass a Batch, tensor, array, Ragged, list or tuple; leave arguments that all "
            "ranks get whole out of shard=(...)",
        )
    if remainder == "pad" and len(value) % num_parts and not isinstance(value, Batch):
        raise DispatchError(
            method=method,
            reason=f"{what} has {len(value)} rows for {num_parts} parts and is a "
            f"{type(value).__qualname__}, which cannot "
            "carry the mask of padded rows",
            step="Give a Batch, or declare remainder='uneven'",
        )
    try:
        parts = _parts(value, num_parts, remainder)
    except UnevenBatchError as error:
        derivation = topology.derivation(sharding.shard)
        raise UnevenBatchError(
            num_rows=error.num_rows,
            divisor=num_parts,
            derivation=derivation,
            what=f"{method}: {what}",
        ) from None
    sizes = [len(part) for part in parts]
    # Rows that the caller has padded count as data.
    padding = [
        max(0, min(size, end - len(value)))
        for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)
    ]
    given = {
        axis: _coordinate(topology, "given to", sharding.give, axis) for axis in sharding.alone
    }
    of_rank = [
        topology.part_of(info.rank, sharding.shard)
        if all(info.along(axis) == at for axis, at in given.items())
        else None
        for info in topology.ranks
    ]
    starts = [0, *itertools.accumulate(sizes[:-1])]
    cut = Cut(sizes, padding)
    if sharding.meta_to_all and None in of_rank and isinstance(value, (Batch, RemoteBatch)):
        of_rank = [num_parts if part is None else part for part in of_rank]
        parts, starts = [*parts, Batch({}, value.meta)], [*starts, len(value)]
    return Argument(parts, of_rank, starts), cut


def _parts(rows: Any, num_parts: int, remainder: Remainder) -> Sequence[Any]:
    if isinstance(rows, Batch):
        return rows.chunk(num_parts, remainder)
    sizes = part_sizes(len(rows), num_parts, remainder)
    ends = itertools.accumulate(sizes)
    return [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _unpadded(method: str, result: Any, num_rows: int, padding: int) -> Any:
    """Remove the padding rows from a part's result, unless the worker already has."""
    if not padding or result is None:
        return result
    kept = num_rows - padding
    if not is_joinable(result) or len(result) not in (num_rows, kept):
        found = f"{len(result)} rows" if is_joinable(result) else f"a {type(result).__qualname__}"
        raise DispatchError(
            method=method,
            reason=f"a part of {num_rows} rows, {padding} of them padding, returned {found}, so "
            "the padding rows of the result are not known",
            step="With remainder='pad', return one row for each row given, or declare "
            "remainder='uneven'",
        )
    return result[:kept]


def _kind_shown(value: Any) -> str:
    if isinstance(value, ResultHandle):
        return value.type_name
    if isinstance(value, (Batch, Ragged)):
        return "Batch" if isinstance(value, Batch) else "Ragged"
    return kind_of(value) or type(value).__qualname__
