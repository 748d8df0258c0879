"""The arguments of a group call, packed once, however many ranks get them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from helmsman.api.errors import ArgumentNotSerializableError, NotSerializableError
from helmsman.api.scheduler import Call, ResultHandle, Scheduler
from helmsman.controller._worker_groups.dispatch import Argument, Dispatched
from helmsman.rpc_server._wire.codec import Packed, encode

_PUT_FROM_BYTES = 64 * 1024
"""What several ranks get and is at least so large is put where each node fetches it once; the rest travels in messages."""


class PackedArguments:
    """What each rank gets, ready to be sent.

    Everything is packed before anything is sent, in the thread of the caller, so what cannot be packed reaches nobody.
    """

    def __init__(self, scheduler: Scheduler, method: str, dispatched: Dispatched) -> None:
        """Pack a call. Raises: ArgumentNotSerializableError."""
        self._scheduler = scheduler
        self._put: list[ResultHandle] = []
        self._calls: dict[tuple[int | None, ...], Call] = {}
        """Arguments by the numbers of their parts of what is cut."""

        def one(name: str, argument: Argument) -> Argument:
            receivers = Counter(argument.of_rank[rank] for rank in dispatched.ranks)
            names = [name] if len(argument.parts) == 1 else [f"{name}<part {number}>" for number in range(len(argument.parts))]
            starts = argument.starts or [0] * len(argument.parts)
            parts = [
                self._pack(method, names[number], part, receivers[number], starts[number]) if receivers[number] else None
                for number, part in enumerate(argument.parts)
            ]
            return Argument(parts, argument.of_rank)

        try:
            self._args = [one(f"args[{index}]", argument) for index, argument in enumerate(dispatched.args)]
            self._kwargs = {name: one(f"kwargs[{name!r}]", argument) for name, argument in dispatched.kwargs.items()}
        except BaseException:
            self.release()
            raise
        every = (*self._args, *self._kwargs.values())
        self._cut = [argument for argument in every if len(argument.parts) > 1 or None in argument.of_rank]
        """Those of which ranks get different parts."""

    def call_of(self, rank: int, rpc_meta: Mapping[str, Any]) -> Call:
        """The call of a rank; ranks with the same arguments share one payload."""
        numbers = tuple([argument.of_rank[rank] for argument in self._cut])
        call = self._calls.get(numbers)
        if call is None:
            args = tuple(argument.for_rank(rank) for argument in self._args)
            kwargs = {name: argument.for_rank(rank) for name, argument in self._kwargs.items()}
            call = self._calls[numbers] = Call(args, kwargs, payload=encode((args, kwargs)))
        return call._replace(rpc_meta=rpc_meta)

    def release(self) -> None:
        """Forget what was put, once all ranks have answered."""
        for handle in self._put:
            self._scheduler.release(handle)

    def _pack(self, method: str, name: str, value: Any, num_receivers: int, start: int) -> Any:
        try:
            packed = Packed(encode(value, root=name))
        except NotSerializableError as error:
            worker_id, _, method = method.partition(".")
            # 'args[0]<part 1>[2].x' is 'args[0][6].x' in the caller's list where the part starts with row 4.
            row = re.compile(r"<part \d+>\[(\d+)\]")
            path = row.sub(lambda found: f"[{start + int(found[1])}]", error.path, 1) if isinstance(value, list) else error.path
            raise ArgumentNotSerializableError(
                worker_id=worker_id,
                engine_name=None,
                method=method,
                path=path,
                value_type=error.value_type,
                reason=error.reason,
            ) from error
        small = packed.payload.nbytes < _PUT_FROM_BYTES
        if small or num_receivers < 2 or packed.payload.handles or self._scheduler.shares_process:
            return packed
        self._put.append(self._scheduler.put(packed))
        return self._put[-1]
