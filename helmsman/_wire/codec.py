"""Payload codec: encodes arguments and results as a pickle stream and a list of raw buffers.

Pickle protocol 5 carries the structure (cloudpickle where a class or function must be sent by
value). Every large buffer stays out of the stream and is not copied. Neither torch nor NumPy is
imported until a value needs it.

Buffers are the caller's own memory until the transport has packed them. Decoded values are private
to the receiver: two views of one storage become two storages, while one object that occurs twice
stays one object.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import msgspec

from helmsman._wire.memory import own_copy, without_write_check
from helmsman._wire.pickle_diagnostics import find_unpicklable
from helmsman._wire.remote_errors import clipped
from helmsman._wire.struct_classes import StructMeta, reduce_struct_class
from helmsman.api.batch import Batch
from helmsman.api.columns import Ragged
from helmsman.api.errors import (
    ArgumentNotSerializableError,
    CodecError,
    NotLoadableError,
    NotSerializableError,
)
from helmsman.api.scheduler import ResultHandle

__all__ = ["Packed", "Payload", "ResultHandle", "decode", "encode"]

_ATOMS = frozenset({type(None), bool, int, float, str})
_CONTAINERS = frozenset({tuple, list, dict})
_PLAIN_DEPTH = 4
_PLAIN_LENGTH = 8
_NONE = pickle.dumps(None, 5)


class Payload(msgspec.Struct, frozen=True):
    """An encoded value. Pickling it with protocol 5, as Ray does, keeps its buffers out of band."""

    data: Any
    """The pickle stream; bytes, or a view of them."""
    buffers: list[Any]
    """One-dimensional views of bytes, in the order of the stream; read-only after ``encode``."""
    handles: list[ResultHandle]
    """Distinct handles inside the value."""

    @property
    def nbytes(self) -> int:
        return len(self.data) + sum(memoryview(buffer).nbytes for buffer in self.buffers)

    def __reduce__(self) -> tuple[Any, ...]:
        return Payload, (
            pickle.PickleBuffer(self.data),
            [pickle.PickleBuffer(buffer) for buffer in self.buffers],
            self.handles,
        )


class Packed:
    """A value that is packed once, to be part of many messages; it arrives as the plain value."""

    __slots__ = ("payload",)

    def __init__(self, payload: Payload) -> None:
        self.payload = payload

    def __reduce__(self) -> tuple[Any, ...]:
        # The handles are pickled as such; the receiver resolves them before it unpacks this.
        # Buffers go without their read-only mark, which pickle would restore: the received copy is
        # the receiver's own and must be writable.
        buffers = [
            pickle.PickleBuffer(without_write_check(buffer)) for buffer in self.payload.buffers
        ]
        return _unpack, (pickle.PickleBuffer(self.payload.data), buffers, self.payload.handles)


def _unpack(data: Any, buffers: list[Any], values: list[Any]) -> Any:
    if not values:
        return pickle.loads(data, buffers=buffers)
    return _HandleUnpickler(data, buffers, values).load()


def encode(obj: Any, *, root: str = "value", inband_below: int = 4096) -> Payload:
    """Encode a value that pickle or cloudpickle accepts. Accelerator tensors arrive on the host.

    Args:
        obj: The value.
        root: Name of the value in error messages.
        inband_below: Buffers of fewer bytes go inside the stream.

    Returns:
        The payload. Its buffers are read-only views of the caller's memory and keep it alive.

    Raises:
        NotSerializableError: A part cannot be pickled; has the path from ``root`` to the part.
    """
    if obj is None:
        return Payload(_NONE, [], [])  # the result of most methods
    if _is_plain(obj, _PLAIN_DEPTH):
        return Payload(pickle.dumps(obj, 5), [], [])
    try:
        return _encode(obj, inband_below)
    except Exception as exc:
        # __reduce__ and __getstate__ of user objects run here, and may raise anything.
        path, value_type, reason = find_unpicklable(
            obj, exc, root, lambda part: _encode(part, inband_below)
        )
        raise NotSerializableError(
            path=path, value_type=value_type, reason=clipped(reason)
        ) from exc


def decode(payload: Payload, *, resolve: Callable[[ResultHandle], Any] | None = None) -> Any:
    """Decode a payload. The value uses the payload's writable buffers; others are copied.

    Args:
        payload: The encoded value.
        resolve: Returns the value of a handle, called once for each; its errors pass through.
            Without it, handles stay handles.

    Raises:
        NotLoadableError: The value cannot be unpickled here, such as for a missing module.
    """
    if payload.data == _NONE:
        return None
    values = payload.handles
    if resolve is not None and values:
        values = [resolve(handle) for handle in values]
    buffers = [own_copy(each) if memoryview(each).readonly else each for each in payload.buffers]
    try:
        if not values:
            return pickle.loads(payload.data, buffers=buffers)
        return _unpack(payload.data, buffers, values)
    # Unpickling imports modules and runs constructors, which may raise anything. A script that
    # parses its arguments at import raises SystemExit, which would end this thread or event loop.
    except (Exception, SystemExit) as exc:
        raise NotLoadableError(
            path="value",
            value_type=f"pickle of {len(payload.data)} bytes and {len(buffers)} buffers",
            reason=clipped(f"{type(exc).__name__}: {exc}"),
        ) from exc


def is_plain(payload: Payload) -> bool:
    """Whether a payload is small and names no class or function, so decoding runs no user code."""
    return (
        len(payload.data) < 4096 and not payload.buffers and pickle.STACK_GLOBAL not in payload.data
    )


def _is_plain(obj: Any, depth: int) -> bool:
    """Whether the value is small and of built-in types alone: the C pickler needs no hooks then."""
    kind = type(obj)
    if kind in _ATOMS or kind is bytes:
        return True
    if kind not in _CONTAINERS or len(obj) > _PLAIN_LENGTH or not depth:
        return False
    if kind is dict:
        for key in obj:
            if type(key) not in _ATOMS:
                return False
        obj = obj.values()
    for item in obj:  # noqa: SIM110 - half the time of all()
        if type(item) not in _ATOMS and not _is_plain(item, depth - 1):
            return False
    return True


def _encode(obj: Any, inband_below: int) -> Payload:
    buffers: list[Any] = []
    handles: dict[str, ResultHandle] = {}

    def keep_inband(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < inband_below:
            return True
        buffers.append(view.toreadonly())
        return False

    stream = io.BytesIO()
    _Pickler(stream, keep_inband, handles, inband_below).dump(obj)
    return Payload(stream.getvalue(), buffers, list(handles.values()))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is not typed
    """cloudpickle, with tensors as raw bytes and handles as indices."""

    def __init__(
        self,
        stream: io.BytesIO,
        keep_inband: Callable[[pickle.PickleBuffer], bool],
        handles: dict[str, ResultHandle],
        inband_below: int,
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=keep_inband)
        self._handles = handles
        self._inband_below = inband_below
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        # A module that another thread is still importing may lack the name.
        self._tensor_type = getattr(torch, "Tensor", None)
        self._array_type = getattr(numpy, "ndarray", None)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object. Not called for built-in types, so lists of numbers pay nothing."""
        kind = type(obj)
        if kind is self._tensor_type:
            from helmsman._wire.tensors import reduce_tensor

            reduced = reduce_tensor(obj)
            return NotImplemented if reduced is None else reduced
        if kind is ResultHandle:
            self._handles.setdefault(obj.id, obj)
            return _handle_at, (list(self._handles).index(obj.id),)
        if kind is Batch or kind is Ragged:
            return obj.__reduce__()  # views stay views: only their own memory is sent
        if kind is self._array_type and obj.nbytes >= self._inband_below and not obj.flags.forc:
            # NumPy pickles a non-contiguous array in band; a compact copy goes out of band.
            return obj.copy(order="K").__reduce_ex__(5)
        if kind is functools.cached_property:  # Python 3.11's has a lock
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
        reduced = super().reducer_override(obj)
        if isinstance(obj, StructMeta) and reduced is not NotImplemented:
            # cloudpickle sends it by value and loses its fields.
            return reduce_struct_class(obj)
        return reduced


def _handle_at(index: int) -> Any:
    """Placeholder in the stream for a handle; the unpickler substitutes the value or the handle."""
    raise pickle.UnpicklingError(
        f"result handle {index} was unpickled outside of a Helmsman payload"
    )


class _HandleUnpickler(pickle.Unpickler):
    def __init__(self, data: Any, buffers: Sequence[Any], values: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._values = values

    def find_class(self, module: str, name: str) -> Any:
        """Return the class, like pickle; ``_handle_at`` instead looks up this payload's values."""
        if name == _handle_at.__name__ and module == __name__:
            return self._values.__getitem__
        return super().find_class(module, name)


def encode_arguments(
    worker_id: str, engine_name: str, method: str, arguments: tuple[Any, ...]
) -> Payload:
    """Encode a call's arguments.

    Raises:
        ArgumentNotSerializableError: A part cannot be pickled; has the path to the part.
    """
    try:
        return encode(arguments, root="arguments")
    except CodecError as error:
        raise ArgumentNotSerializableError(
            worker_id=worker_id,
            engine_name=engine_name,
            method=method,
            path=_argument_path(error.path, len(arguments)),
            value_type=error.value_type,
            reason=error.reason,
        ) from error


def _argument_path(path: str, num_parts: int) -> str:
    names = ("args", "kwargs") if num_parts == 2 else ("engine", "args", "kwargs")
    for index, name in enumerate(names):
        path = path.replace(f"arguments[{index}]", name, 1)
    return path
