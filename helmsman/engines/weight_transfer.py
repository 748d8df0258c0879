"""Weights on their way from a trainer's ranks to a rollout instance: in memory, as files, or by broadcasts; in buckets.

A trainer sends its tensors by ``publish``; an instance reads what comes by ``incoming``, whichever way that is. By broadcasts,
each bucket is a header (msgpack) and the bytes of its tensors end to end; the first header has the names and shapes of all, so
that an instance can refuse before it has changed anything.
"""

from __future__ import annotations

import abc
import contextlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import safe_open

from helmsman.api.weights import (
    ByCollective,
    IntoMemory,
    OntoDisk,
    WeightFormat,
    Weights,
    WeightsInMemory,
    WeightsOnDisk,
    WeightTarget,
)
from helmsman.engines._models.distributed import failing_together
from helmsman.engines._models.files import replace_folder, save_tensors
from helmsman.engines._models.model import resolve_dtype
from helmsman.engines._models.tensors import full_tensor
from helmsman.engines._weights.group import WeightGroup

_INDEX_FILE = "model.safetensors.index.json"
_VERSION_FOLDER = "version-"


def checksum_of(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    data: Any = as_bytes(tensor.cpu()).numpy()
    return zlib.crc32(data)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """(N,) uint8: the bytes of a tensor, without a copy where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# --- the trainer's side -------------------------------------------------------------------------------------------------------


class _Bucket(NamedTuple):
    tensors: dict[str, torch.Tensor]
    checksums: dict[str, int]


def publish(
    tensors: Mapping[str, torch.Tensor],
    target: WeightTarget,
    form: WeightFormat,
    *,
    version: int,
    is_root: bool,
    group: WeightGroup,
    full: Callable[[torch.Tensor], torch.Tensor] = full_tensor,
) -> WeightsInMemory | WeightsOnDisk | int | None:
    """Send tensors by name, which have this version, to a target. Every rank that has shards of them calls it with the same;
    rank 0 sends, and returns what was made. ``full`` gives all of a tensor, on any device.

    Raises: ValueError for another version than the target's, names that are the same once they are mapped, or a type that is
    none; on every rank what the target raises, after all ranks have come to the end.
    """
    try:
        if version != target.version:
            raise ValueError(
                f"the trainer has weight version {version}, and version {target.version} was to be sent: it has gone on since "
                "it was asked. Take no step, and load nothing, until a push has returned; then push again"
            )
        dtype = None if form.dtype is None else resolve_dtype(form.dtype)
        names = _mapped_names(tensors, form)
    except ValueError as wrong:
        if is_root and isinstance(target, ByCollective):
            _GroupSink(target, group).give_up(wrong)
        raise
    result: WeightsInMemory | WeightsOnDisk | int | None = None
    error: Exception | None = None
    with contextlib.ExitStack() as stack:
        sink: _Sink | None = None
        packer: _Packer | None = None
        try:
            if is_root:
                sink = _sink_for(target, {names[name]: list(each.shape) for name, each in tensors.items()}, group, stack)
                packer = _Packer(sink, dtype, form)
        except Exception as exc:  # noqa: BLE001 - raised below, once the other ranks' collectives have been served
            error = exc
        for name, tensor in tensors.items():
            try:
                whole = full(tensor)
            except Exception as exc:
                if isinstance(sink, _GroupSink):
                    sink.give_up(error or exc)
                raise  # the other ranks are gone or late, and wait for nothing
            if packer is None or error is not None:
                continue
            try:
                packer.add(names[name], whole)
            except Exception as exc:  # noqa: BLE001 - as above
                error = exc
        try:
            if packer is not None and error is None:
                result = packer.finish()
        except Exception as exc:  # noqa: BLE001 - as above
            error = exc
        with failing_together("publishing the weights"):
            if error is not None:
                if isinstance(sink, _GroupSink):
                    sink.give_up(error)
                raise error
    return result


def _mapped_names(names: Iterable[str], form: WeightFormat) -> dict[str, str]:
    """Name here -> name where they arrive."""
    sources: dict[str, str] = {}
    for name in names:
        mapped = form.name_of(name)
        if mapped in sources:
            raise ValueError(f"{sources[mapped]!r} and {name!r} are both called {mapped!r} by WeightFormat.names")
        sources[mapped] = name
    return {name: mapped for mapped, name in sources.items()}


class _Sink(abc.ABC):
    """Takes buckets on rank 0."""

    @abc.abstractmethod
    def put(self, bucket: _Bucket) -> None: ...

    @abc.abstractmethod
    def finish(self) -> WeightsInMemory | WeightsOnDisk | int: ...


class _Packer:
    """Makes buckets of full tensors for a sink: cast, and with checksums."""

    def __init__(self, sink: _Sink, dtype: torch.dtype | None, form: WeightFormat) -> None:
        self._sink, self._dtype, self._form = sink, dtype, form
        self._tensors: dict[str, torch.Tensor] = {}
        self._num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        if self._tensors and self._num_bytes + tensor.nbytes > self._form.bucket_bytes:
            self._put()
        self._tensors[name] = tensor
        self._num_bytes += tensor.nbytes

    def finish(self) -> WeightsInMemory | WeightsOnDisk | int:
        if self._tensors:
            self._put()
        return self._sink.finish()

    def _put(self) -> None:
        checksums = {name: checksum_of(tensor) for name, tensor in self._tensors.items()} if self._form.checksum else {}
        self._sink.put(_Bucket(self._tensors, checksums))
        self._tensors, self._num_bytes = {}, 0


def _sink_for(
    target: WeightTarget, shapes: Mapping[str, list[int]], group: WeightGroup, until_the_end: contextlib.ExitStack
) -> _Sink:
    if isinstance(target, IntoMemory):
        return _MemorySink()
    if isinstance(target, OntoDisk):
        return _DiskSink(target, until_the_end)
    sink = _GroupSink(target, group)
    sink.announce(shapes)
    return sink


class _MemorySink(_Sink):
    def __init__(self) -> None:
        self._weights = WeightsInMemory({}, {})

    def put(self, bucket: _Bucket) -> None:
        assert isinstance(self._weights.tensors, dict)
        assert isinstance(self._weights.checksums, dict)
        # Copies also of what is on the host: a parameter of one shard would go on changing, and go when the trainer sleeps.
        self._weights.tensors.update({name: tensor.to("cpu", copy=True) for name, tensor in bucket.tensors.items()})
        self._weights.checksums.update(bucket.checksums)

    def finish(self) -> WeightsInMemory:
        return self._weights


class _DiskSink(_Sink):
    """Files in a folder that gets its name when it is complete."""

    def __init__(self, target: OntoDisk, until_the_end: contextlib.ExitStack) -> None:
        self._folder, self._version, self._num_kept = os.path.abspath(target.folder), target.version, target.num_kept
        os.makedirs(self._folder, exist_ok=True)
        self._unfinished = tempfile.mkdtemp(prefix=f".{_VERSION_FOLDER}{target.version}.", dir=self._folder)
        until_the_end.callback(shutil.rmtree, self._unfinished, ignore_errors=True)
        os.chmod(self._unfinished, 0o755)
        self._files: dict[str, str] = {}
        self._checksums: dict[str, int] = {}
        self._num_files = self._num_bytes = 0

    def put(self, bucket: _Bucket) -> None:
        self._num_files += 1
        file = f"model-{self._num_files:05d}.safetensors"
        tensors = {name: tensor.cpu().contiguous() for name, tensor in bucket.tensors.items()}
        save_tensors(tensors, os.path.join(self._unfinished, file))
        self._files.update(dict.fromkeys(tensors, file))
        self._checksums.update(bucket.checksums)
        self._num_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def finish(self) -> WeightsOnDisk:
        metadata = {"total_size": self._num_bytes, **({"crc32": self._checksums} if self._checksums else {})}
        with open(os.path.join(self._unfinished, _INDEX_FILE), "w") as file:
            json.dump({"metadata": metadata, "weight_map": self._files}, file)
        path = os.path.join(self._folder, f"{_VERSION_FOLDER}{self._version:010d}")
        replace_folder(self._unfinished, path)
        self._remove_old(path)
        return WeightsOnDisk(path, self._num_bytes)

    def _remove_old(self, path: str) -> None:
        """Leave this version and those that were written last: numbers of an earlier run may be higher."""
        others = [
            (entry.stat().st_mtime_ns, entry.path)
            for entry in os.scandir(self._folder)
            if entry.name.startswith(_VERSION_FOLDER) and entry.path != path
        ]
        for _, old in sorted(others, reverse=True)[max(0, self._num_kept - 1) :]:
            shutil.rmtree(old, ignore_errors=True)  # somebody else's business otherwise


class _Header(msgspec.Struct, frozen=True):
    """What follows by broadcasts."""

    shapes: dict[str, list[int]]
    dtypes: dict[str, str] = {}
    checksums: dict[str, int] = {}
    num_bytes: int = 0
    """Of the tensors that follow; with 0 there are no more of them."""
    error: str = ""
    """Why they do not come."""


class _GroupSink(_Sink):
    def __init__(self, place: ByCollective, group: WeightGroup) -> None:
        self._group, self._num_bytes = group, 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device=group.device)
        group.join(place)

    def announce(self, shapes: Mapping[str, list[int]]) -> None:
        """Say what will come."""
        self._tell(_Header(dict(shapes)))

    def give_up(self, error: Exception) -> None:
        """Say that nothing more will come, unless it is the group that is broken."""
        if not isinstance(error, ConnectionError):
            with contextlib.suppress(ConnectionError):  # it is the other error that counts
                self._tell(_Header({}, error=f"{type(error).__name__}: {error}"))

    def _tell(self, header: _Header) -> None:
        self._group.broadcast_bytes(msgspec.msgpack.encode(header))

    def put(self, bucket: _Bucket) -> None:
        tensors = bucket.tensors
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if num_bytes == 0:
            return
        header = _Header(
            {name: list(tensor.shape) for name, tensor in tensors.items()},
            {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()},
            bucket.checksums,
            num_bytes,
        )
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._group.device)
        view = self._buffer[:num_bytes]
        start = 0
        for tensor in tensors.values():
            view[start : start + tensor.nbytes].copy_(as_bytes(tensor))
            start += tensor.nbytes
        self._tell(header)  # and nothing that may fail before the bytes are sent: the others wait for them
        self._group.broadcast(view)
        self._num_bytes += num_bytes

    def finish(self) -> int:
        self._tell(_Header({}))
        return self._num_bytes


# --- the instance's side ------------------------------------------------------------------------------------------------------


class Incoming(abc.ABC):
    """Weights that come, bucket by bucket; to be read once."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of all of them, known before the first one is there."""

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Buckets of tensors by name, which are the reader's until the next one is asked for. Raises: ValueError for bytes that
        are not those that were sent, where checksums are; ConnectionError; OSError."""


@contextlib.contextmanager
def incoming(weights: Weights, group: WeightGroup) -> Iterator[Incoming]:
    """Read weights, however they come. Raises: ConnectionError, OSError, ValueError."""
    if isinstance(weights, ByCollective):
        received = _Received(weights, group)
        try:
            yield received
        finally:
            received.read_to_the_end()
    elif isinstance(weights, WeightsOnDisk):
        yield _Files(weights)
    else:
        yield _Given(weights if isinstance(weights, WeightsInMemory) else WeightsInMemory(weights))


class _Given(Incoming):
    """They are here already."""

    def __init__(self, weights: WeightsInMemory) -> None:
        _require_checksums(weights.tensors, weights.checksums)  # of all of them, while nothing has changed
        self._tensors = weights.tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}

    def __iter__(self) -> Iterator[Mapping[str, torch.Tensor]]:
        yield self._tensors


class _Files(Incoming):
    """A folder of safetensors with an index."""

    def __init__(self, weights: WeightsOnDisk) -> None:
        self._path = weights.path
        with open(os.path.join(weights.path, _INDEX_FILE), "rb") as file:
            index = json.load(file)
        self._names: dict[str, list[str]] = {}
        for name, file_name in index["weight_map"].items():
            self._names.setdefault(file_name, []).append(name)
        self._checksums: dict[str, int] = index["metadata"].get("crc32", {})
        self.shapes = {}
        for file_name, names in self._names.items():
            with self._open(file_name) as tensors:
                self.shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in names})

    def __iter__(self) -> Iterator[Mapping[str, torch.Tensor]]:
        for file_name, names in self._names.items():
            with self._open(file_name) as tensors:
                bucket = {name: tensors.get_tensor(name) for name in names}
                _require_checksums(bucket, self._checksums)
                yield bucket

    def _open(self, file_name: str) -> Any:
        return safe_open(os.path.join(self._path, file_name), framework="pt")


class _Received(Incoming):
    """Broadcasts of a group. What its reader does not want is received all the same: the others wait for nobody."""

    def __init__(self, place: ByCollective, group: WeightGroup) -> None:
        self._group = group
        self._is_over = True  # nothing is to be received if it cannot begin
        self._buffer = torch.empty(0, dtype=torch.uint8, device=group.device)
        group.join(place)
        self.shapes = {name: tuple(shape) for name, shape in self._header().shapes.items()}
        self._is_over = False

    def __iter__(self) -> Iterator[Mapping[str, torch.Tensor]]:
        while (received := self._next()) is not None:
            header, bucket = received
            _require_checksums(bucket, header.checksums)
            yield bucket

    def read_to_the_end(self) -> None:
        """Receive what is left, so that the group stays usable, unless it is broken."""
        with contextlib.suppress(ConnectionError, RuntimeError):
            while self._next() is not None:
                pass

    def _header(self) -> _Header:
        header = msgspec.msgpack.decode(self._group.broadcast_bytes(None), type=_Header)
        if header.error:
            raise RuntimeError(f"the trainer could not send its weights: {header.error}")
        return header

    def _next(self) -> tuple[_Header, dict[str, torch.Tensor]] | None:
        if self._is_over:
            return None
        self._is_over = True  # unless this one comes
        header = self._header()
        if header.num_bytes == 0:
            return None
        if self._buffer.numel() < header.num_bytes:
            try:
                self._buffer = torch.empty(header.num_bytes, dtype=torch.uint8, device=self._group.device)
            except RuntimeError:  # no room; the others would wait for this one
                self._group.leave()
                raise
        view = self._buffer[: header.num_bytes]
        self._group.broadcast(view)
        self._is_over = False
        tensors: dict[str, torch.Tensor] = {}
        start = 0
        for name, shape in header.shapes.items():
            dtype: torch.dtype = getattr(torch, header.dtypes[name])
            num_bytes = dtype.itemsize * torch.Size(shape).numel()
            part = view[start : start + num_bytes]
            start += num_bytes
            # A view of another type begins at a multiple of its size, which one that follows smaller types may not.
            aligned = part if part.storage_offset() % dtype.itemsize == 0 else part.clone()
            tensors[name] = aligned.view(dtype).view(shape)
        return header, tensors


def _require_checksums(tensors: Mapping[str, torch.Tensor], checksums: Mapping[str, int]) -> None:
    wrong = [name for name, tensor in tensors.items() if name in checksums and checksum_of(tensor) != checksums[name]]
    if wrong:
        raise ValueError(
            f"{len(wrong)} of {len(tensors)} parameters did not arrive as they were sent (CRC-32): {', '.join(wrong[:4])}"
        )
