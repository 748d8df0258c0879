"""Weight transfer from a trainer to a rollout instance: in memory, as files or as streams.

The trainer's ranks send their tensors with ``publish``, and an instance reads them with
``incoming``; both work in buckets. A stream is a series of broadcasts, or goes through buffers on a
shared device. Each bucket is a header (msgpack) followed by the bytes of its tensors, concatenated.
The first header has the names and shapes of all tensors, so that an instance can refuse them before
it has changed anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from safetensors import safe_open

from helmsman.api.weights import (
    CollectiveTarget,
    DeviceTarget,
    DiskTarget,
    MemoryTarget,
    WeightFormat,
    Weights,
    WeightsInMemory,
    WeightsOnDisk,
    WeightTarget,
)
from helmsman.engines._models.files import INDEX_FILE, FolderWriter, replace_folder
from helmsman.engines._models.model import resolve_dtype
from helmsman.engines._weights.checkpoint_names import CheckpointNames, Conversion
from helmsman.engines._weights.gathering import gather, type_in
from helmsman.engines._weights.group import TensorReceiver, TensorSender, WeightGroup
from helmsman.engines._weights.sending import (
    Bucket,
    Gather,
    Packer,
    Sink,
    as_bytes,
    checksum_of,
    send_all,
)

_VERSION_FOLDER = "version-"


# --- the trainer's side ---------------------------------------------------------------------------


def publish(
    tensors: Mapping[str, torch.Tensor],
    target: WeightTarget,
    form: WeightFormat,
    *,
    version: int,
    is_root: bool,
    group: WeightGroup,
    gather: Gather = gather,
    in_files: CheckpointNames | None = None,
) -> WeightsInMemory | WeightsOnDisk | int | None:
    """Send tensors by name to a target. A collective of all ranks that hold shards.

    Rank 0 sends, or each rank to the processes on its device.

    Args:
        tensors: Tensors by name, of any dtype and device, possibly sharded (DTensor); the same
            names on every rank. Instances expect the names and shapes of Hugging Face files.
        target: Memory, a folder on disk, a weight-sync group or buffers on devices, with the
            version to send.
        form: Dtype, names, bucket size in bytes and checksums of the sent tensors.
        version: Weight version of the tensors.
        is_root: Whether this is rank 0.
        group: This process's membership in weight-sync groups.
        gather: Gathers whole tensors of a dtype from their shards, on any device.
        in_files: Converts the tensors of a model to the form of files; None if they have it.

    Returns:
        On rank 0 the weights in memory, the folder, or the number of bytes sent; None elsewhere.

    Raises:
        ValueError: ``version`` is not the target's, two names map to the same one, or the dtype is
            unknown.
        ConnectionError: On rank 0: a member of the weight-sync group is missing or late.
        DeviceSharingError: This rank's device has memory that other processes cannot map.
        OSError: On rank 0: the files cannot be written.
        RuntimeError: Another rank failed. All ranks take part until the end.
    """
    sends = is_root or (isinstance(target, DeviceTarget) and group.serves(target))
    try:
        if version != target.version:
            raise ValueError(
                f"the trainer has weight version {version}, but version {target.version} was to "
                "be sent: its weights changed during the push. Take no step, and load nothing, "
                "until a push has returned; then push again"
            )
        dtype = None if form.dtype is None else resolve_dtype(form.dtype)
        shapes = (
            {name: list(each.shape) for name, each in tensors.items()}
            if in_files is None
            else in_files.shapes
        )
        sent = _sent_names(shapes, form)
    except ValueError as wrong:
        if sends and isinstance(target, CollectiveTarget | DeviceTarget):
            StreamSink(group.sending(target, 0)).give_up(wrong)
        raise
    sizes = [each.numel() * type_in(each, dtype).itemsize for each in tensors.values()]

    def pack(stack: contextlib.ExitStack) -> Packer[Any]:
        convert = None if in_files is None else Conversion(in_files)

        def renamed(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
            parts = {name: tensor} if convert is None else convert(name, tensor)
            return {sent[each]: part for each, part in parts.items()}

        if isinstance(target, MemoryTarget):
            sink: Sink[Any] = _MemorySink()
        elif isinstance(target, DiskTarget):
            sink = _DiskSink(target, stack)
        else:
            most = form.bucket_bytes
            if isinstance(target, DeviceTarget):
                most = max(1, min(sum(sizes), max(most, *sizes)))
            way = group.sending(target, most)
            stack.callback(way.end)
            sink = stream = StreamSink(way)
            stream.announce({sent[name]: shapes[name] for name in shapes}, most)
        return Packer(sink, form.bucket_bytes, convert=renamed, checksum=form.checksum)

    return send_all(
        tensors,
        gather,
        dtype,
        form.bucket_bytes,
        pack if sends else None,
        "publishing the weights",
    )


def _sent_names(names: Iterable[str], form: WeightFormat) -> dict[str, str]:
    """Return the name under which each tensor is sent."""
    sent: dict[str, str] = {}
    sources: dict[str, str] = {}
    for name in names:
        mapped = sent[name] = form.name_of(name)
        if mapped in sources:
            raise ValueError(
                f"{sources[mapped]!r} and {name!r} are both mapped to {mapped!r} by "
                "WeightFormat.names"
            )
        sources[mapped] = name
    return sent


class _MemorySink(Sink[WeightsInMemory]):
    def __init__(self) -> None:
        self._weights = WeightsInMemory({}, {})

    def put(self, bucket: Bucket) -> None:
        assert isinstance(self._weights.tensors, dict)
        assert isinstance(self._weights.checksums, dict)
        # Host tensors are copied too: an unsharded parameter would keep changing with training,
        # and its memory is released when the trainer sleeps.
        self._weights.tensors.update(
            {name: tensor.to("cpu", copy=True) for name, tensor in bucket.tensors.items()}
        )
        self._weights.checksums.update(bucket.checksums)

    def finish(self) -> WeightsInMemory:
        return self._weights


class _DiskSink(Sink[WeightsOnDisk]):
    """Writes files into a folder that is renamed to its final name when complete."""

    def __init__(self, target: DiskTarget, until_the_end: contextlib.ExitStack) -> None:
        self._folder = os.path.abspath(target.folder)
        self._version = target.version
        self._num_kept = target.num_kept
        os.makedirs(self._folder, exist_ok=True)
        self._unfinished = tempfile.mkdtemp(
            prefix=f".{_VERSION_FOLDER}{target.version}.", dir=self._folder
        )
        until_the_end.callback(shutil.rmtree, self._unfinished, ignore_errors=True)
        os.chmod(self._unfinished, 0o755)
        self._writer = FolderWriter(self._unfinished)
        self._checksums: dict[str, int] = {}

    def put(self, bucket: Bucket) -> None:
        self._writer.write(bucket.tensors)
        self._checksums.update(bucket.checksums)

    def finish(self) -> WeightsOnDisk:
        self._writer.finish({"crc32": self._checksums} if self._checksums else None)
        path = os.path.join(self._folder, f"{_VERSION_FOLDER}{self._version:010d}")
        replace_folder(self._unfinished, path)
        self._remove_old(path)
        return WeightsOnDisk(path, self._writer.num_bytes)

    def _remove_old(self, path: str) -> None:
        """Remove all but this version and the most recently written ones.

        Recency is by modification time, since an earlier run may have left higher version numbers.
        """
        others = [
            (entry.stat().st_mtime_ns, entry.path)
            for entry in os.scandir(self._folder)
            if entry.name.startswith(_VERSION_FOLDER) and entry.path != path
        ]
        for _, old in sorted(others, reverse=True)[max(0, self._num_kept - 1) :]:
            shutil.rmtree(old, ignore_errors=True)  # it may belong to another user


class _Header(msgspec.Struct, frozen=True):
    shapes: dict[str, list[int]]
    dtypes: dict[str, str] = {}
    checksums: dict[str, int] = {}
    bucket_bytes: int = 0
    """In the first header: maximum bytes of one broadcast."""
    num_bytes: int = 0
    """Size of the tensors that follow; 0 ends the transfer."""
    error: str = ""
    """Why the tensors are not sent; empty if they are."""


class StreamSink(Sink[int]):
    """Sends weights as a stream of headers and bytes."""

    def __init__(self, way: TensorSender) -> None:
        self._way, self._num_bytes, self._is_over = way, 0, False
        self._bucket_bytes = 0

    def announce(self, shapes: Mapping[str, Sequence[int]], bucket_bytes: int) -> None:
        """Send the names and shapes of all tensors, and the size of the largest piece."""
        self._bucket_bytes = bucket_bytes
        self._send({name: list(shape) for name, shape in shapes.items()}, bucket_bytes=bucket_bytes)

    def give_up(self, error: Exception) -> None:
        """Send the reason why no more tensors follow.

        Does nothing if all have been sent or the group is broken.
        """
        if not self._is_over and not isinstance(error, ConnectionError):
            self._is_over = True
            with contextlib.suppress(ConnectionError):  # the caller raises the first error
                self._send({}, error=f"{type(error).__name__}: {error}")
                self._way.end()

    def _send(self, shapes: dict[str, list[int]], **others: Any) -> None:
        self._way.send_header(msgspec.msgpack.encode(_Header(shapes, **others)))

    def put(self, bucket: Bucket) -> None:
        """Send a bucket: its header, then its bytes, which may still be on their way afterwards.

        More than ``bucket_bytes``, which is one tensor, leave in pieces of that size.
        """
        tensors = bucket.tensors
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if num_bytes == 0:
            return
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        dtypes = {
            name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()
        }
        parts = [as_bytes(tensor) for tensor in tensors.values()]
        pieces = [parts]
        if num_bytes > self._bucket_bytes:
            pieces = [[piece] for piece in parts[0].split(self._bucket_bytes)]
        for index, piece in enumerate(pieces):
            size = sum(part.numel() for part in piece)
            buffer, start = self._way.buffer(size), 0
            if index == 0:
                self._send(shapes, dtypes=dtypes, checksums=bucket.checksums, num_bytes=num_bytes)
                # Now the receivers wait for the bytes, so nothing before the end may fail.
            for part in piece:
                buffer[start : start + part.numel()].copy_(part)
                start += part.numel()
            self._way.send(size)
        self._num_bytes += num_bytes

    def finish(self) -> int:
        """Send the end of the transfer; returns the number of bytes sent."""
        self._is_over = True
        self._send({})
        self._way.end()
        return self._num_bytes


# --- the instance's side --------------------------------------------------------------------------


class Incoming:
    """Incoming weights, bucket by bucket. Can be iterated once.

    Iterating raises ValueError when a checksum does not match, ConnectionError or OSError.

    Args:
        shapes: Shapes of all tensors by name, known before the first bucket arrives.
        buckets: Tensors by name; each bucket is valid until the next one is requested. A tensor
            that exceeds the size of a broadcast bucket is on the host.
        bucket_bytes: Size of the largest broadcast; 0 if there are none.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        buckets: Iterator[Mapping[str, torch.Tensor]],
        bucket_bytes: int = 0,
    ) -> None:
        self.shapes, self._buckets, self.bucket_bytes = shapes, buckets, bucket_bytes

    def __iter__(self) -> Iterator[Mapping[str, torch.Tensor]]:
        return self._buckets


@contextlib.contextmanager
def incoming(weights: Weights, group: WeightGroup) -> Iterator[Incoming]:
    """Read weights from memory, files, broadcasts or buffers on this device.

    Args:
        weights: The weights, or their location.
        group: This process's membership in weight-sync groups.

    Yields:
        Their shapes, and their tensors in buckets.

    Raises:
        ConnectionError: A member of the weight-sync group is missing or late, or the trainer rank
            on this device is.
        DeviceSharingError: The buffers of the trainer rank cannot be mapped.
        OSError: The files cannot be read.
        RuntimeError: The trainer reported that it cannot send its weights.
        ValueError: A checksum does not match.
    """
    if isinstance(weights, CollectiveTarget | DeviceTarget):
        way = group.receiving(weights)
        with contextlib.ExitStack() as stack:
            stack.callback(way.end)
            received = _Received(way)
            if way is group:
                stack.callback(received.read_to_the_end)
            try:
                yield Incoming(received.shapes, received.buckets(), received.bucket_bytes)
            except BaseException as error:
                _clear_frames(error)
                raise
    elif isinstance(weights, WeightsOnDisk):
        yield _in_files(weights)
    else:
        yield _in_memory(
            weights if isinstance(weights, WeightsInMemory) else WeightsInMemory(weights)
        )


def _in_memory(weights: WeightsInMemory) -> Incoming:
    # All checksums are verified before the first tensor is handed out.
    _require_checksums(weights.tensors, weights.checksums)
    return Incoming(
        {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()},
        iter([weights.tensors]),
    )


def _in_files(weights: WeightsOnDisk) -> Incoming:
    with open(os.path.join(weights.path, INDEX_FILE), "rb") as file:
        index = json.load(file)
    names_in: dict[str, list[str]] = {}
    for name, file_name in index["weight_map"].items():
        names_in.setdefault(file_name, []).append(name)

    def open_file(file_name: str) -> Any:
        return safe_open(os.path.join(weights.path, file_name), framework="pt")

    def buckets() -> Iterator[Mapping[str, torch.Tensor]]:
        for file_name, names in names_in.items():
            with open_file(file_name) as tensors:
                bucket = {name: tensors.get_tensor(name) for name in names}
                _require_checksums(bucket, index["metadata"].get("crc32", {}))
                yield bucket

    shapes: dict[str, tuple[int, ...]] = {}
    for file_name, names in names_in.items():
        with open_file(file_name) as tensors:
            shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in names})
    return Incoming(shapes, buckets())


def _clear_frames(error: BaseException | None) -> None:
    """Drop the local variables of an error's frames, which would keep buffers mapped."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _Received:
    """A stream that has been sent by a StreamSink."""

    def __init__(self, way: TensorReceiver) -> None:
        self._way = way
        first = self._header()
        self.shapes = {name: tuple(shape) for name, shape in first.shapes.items()}
        self.bucket_bytes = first.bucket_bytes
        self._is_over = False

    def buckets(self) -> Iterator[Mapping[str, torch.Tensor]]:
        while (received := self._next()) is not None:
            header, bucket = received
            _require_checksums(bucket, header.checksums)
            yield bucket

    def read_to_the_end(self) -> None:
        """Receive the remaining buckets, because the other members of a group do not wait.

        Does nothing if the group is broken.
        """
        with contextlib.suppress(ConnectionError, RuntimeError):
            while self._next() is not None:
                pass

    def _header(self) -> _Header:
        header = msgspec.msgpack.decode(self._way.receive_header(), type=_Header)
        if header.error:
            raise RuntimeError(f"the trainer could not send its weights: {header.error}")
        return header

    def _next(self) -> tuple[_Header, dict[str, torch.Tensor]] | None:
        if self._is_over:
            return None
        self._is_over = True  # reset below once this bucket has arrived
        header = self._header()
        if header.num_bytes == 0:
            return None
        view = self._bytes(header.num_bytes)
        self._is_over = False
        tensors: dict[str, torch.Tensor] = {}
        start = 0
        for name, shape in header.shapes.items():
            dtype: torch.dtype = getattr(torch, header.dtypes[name])
            num_bytes = dtype.itemsize * torch.Size(shape).numel()
            part = view[start : start + num_bytes]
            start += num_bytes
            # A view needs an offset that is a multiple of its item size. Tensors that follow
            # smaller dtypes may lack it.
            aligned = part if part.storage_offset() % dtype.itemsize == 0 else part.clone()
            tensors[name] = aligned.view(dtype).view(shape)
        return header, tensors

    def _bytes(self, num_bytes: int) -> torch.Tensor:
        """Receive so many bytes; more than a bucket has are collected on the host."""
        if num_bytes <= self.bucket_bytes:
            return self._way.receive(num_bytes)
        try:
            whole = torch.empty(num_bytes, dtype=torch.uint8)
        except RuntimeError:  # Out of memory: leave, or the other members would wait.
            self._way.leave()
            raise
        for piece in whole.split(self.bucket_bytes):
            piece.copy_(self._way.receive(piece.numel()))
        return whole


def _require_checksums(tensors: Mapping[str, torch.Tensor], checksums: Mapping[str, int]) -> None:
    wrong = [
        name
        for name, tensor in tensors.items()
        if name in checksums and checksum_of(tensor) != checksums[name]
    ]
    if wrong:
        raise ValueError(
            f"{len(wrong)} of {len(tensors)} parameters have wrong checksums (CRC-32) after the "
            f"transfer: {', '.join(wrong[:4])}"
        )
