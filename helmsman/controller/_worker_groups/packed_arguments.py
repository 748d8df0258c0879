"""The arguments of a group call, packed once, however many ranks get them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

from helmsman.api.errors import ArgumentNotSerializableError, NotSerializableError
from helmsman.api.scheduler import Call, ResultHandle, Scheduler
from helmsman.controller._worker_groups.dispatch import Argument, Dispatched
from helmsman.rpc_server._wire.codec import Packed, encode

_PUT_FROM_BYTES = 64 * 1024
"""What several ranks get and is at least so large is put where each node fetches it once; the rest travels in messages."""


class PackedArguments:
    """What each rank gets, ready to be sent. As an async context manager it forgets what was put once all ranks have answered.

    Everything is packed before anything is sent, in the thread of the caller, so what cannot be packed reaches nobody.
    """

    def __init__(
        self, args: Sequence[Argument], kwargs: Mapping[str, Argument], put: Sequence[ResultHandle], scheduler: Scheduler
    ):
        self._args = args
        self._kwargs = kwargs
        self._put = put
        self._scheduler = scheduler
        self._cut = [argument for argument in (*args, *kwargs.values()) if len(argument.parts) > 1 or None in argument.of_rank]
        """Those of which ranks get different parts."""
        self._calls: dict[tuple[int | None, ...], Call] = {}
        """Arguments by the numbers of their parts of what is cut."""

    @classmethod
    def pack(cls, scheduler: Scheduler, method: str, dispatched: Dispatched) -> PackedArguments:
        """Pack a call. Raises: ArgumentNotSerializableError."""
        put: list[ResultHandle] = []

        def one(name: str, argument: Argument) -> Argument:
            receivers = Counter(argument.of_rank[rank] for rank in dispatched.ranks)
            names = [name] if len(argument.parts) == 1 else [f"{name}<part {number}>" for number in range(len(argument.parts))]
            starts = argument.starts or [0] * len(argument.parts)
            parts = [
                _pack(scheduler, method, names[number], part, receivers[number], put, starts[number])
                if receivers[number]
                else None
                for number, part in enumerate(argument.parts)
            ]
            return Argument(parts, argument.of_rank)

        try:
            args = [one(f"args[{index}]", argument) for index, argument in enumerate(dispatched.args)]
            kwargs = {name: one(f"kwargs[{name!r}]", argument) for name, argument in dispatched.kwargs.items()}
        except BaseException:
            for handle in put:
                scheduler.release(handle)
            raise
        return cls(args, kwargs, put, scheduler)

    def call_of(self, rank: int, rpc_meta: Mapping[str, Any]) -> Call:
        """The call of a rank; ranks with the same arguments share one payload."""
        numbers = tuple([argument.of_rank[rank] for argument in self._cut])
        call = self._calls.get(numbers)
        if call is None:
            args = tuple(argument.for_rank(rank) for argument in self._args)
            kwargs = {name: argument.for_rank(rank) for name, argument in self._kwargs.items()}
            call = self._calls[numbers] = Call(args, kwargs, payload=encode((args, kwargs)))
        return call._replace(rpc_meta=rpc_meta)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for handle in self._put:
            self._scheduler.release(handle)


def _pack(
    scheduler: Scheduler, method: str, name: str, value: Any, num_receivers: int, put: list[ResultHandle], start: int
) -> Any:
    try:
        packed = Packed(encode(value, root=name))
    except NotSerializableError as error:
        raise ArgumentNotSerializableError(
            worker_id=method.partition(".")[0],
            engine_name=None,
            method=method.partition(".")[2],
            path=_as_given(error.path, start) if isinstance(value, list) else error.path,
            value_type=error.value_type,
            reason=error.reason,
        ) from error
    small = packed.payload.nbytes < _PUT_FROM_BYTES
    if small or num_receivers < 2 or packed.payload.handles or scheduler.shares_process:
        return packed
    handle = scheduler.put(packed)
    put.append(handle)
    return handle


def _as_given(path: str, start: int) -> str:
    """The path in the caller's list: ``args[0]<part 1>[2].x`` is ``args[0][6].x`` where the part starts with row 4."""
    return re.sub(r"<part \d+>\[(\d+)\]", lambda found: f"[{start + int(found[1])}]", path, count=1)
