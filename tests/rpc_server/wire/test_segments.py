"""Shared-memory segments, between real processes."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helmsman.api.errors import ProtocolError
from helmsman.rpc_server._wire import segments
from helmsman.rpc_server._wire import wire as wire_module
from helmsman.rpc_server._wire.codec import Payload, ResultHandle, decode, encode
from helmsman.rpc_server._wire.segments import (
    SegmentLocation,
    ShmSegment,
    attach,
    can_reuse,
    pack,
    spares,
)
from helmsman.rpc_server._wire.wire import WirePayload, from_wire, to_wire

pytestmark = pytest.mark.skipif(not segments.HAS_SEGMENTS, reason="no memfd on this system")

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

# Packs numbers, tells where, and keeps the segment until a line comes.
OWNER = """
import sys, msgspec, numpy
from helmsman.rpc_server._wire.codec import encode
from helmsman.rpc_server._wire.wire import to_wire
payload = encode(numpy.arange(1_000_000))
wire, segment = to_wire(payload)
message = msgspec.msgpack.encode(wire)
sys.stdout.buffer.write(len(message).to_bytes(4, "big") + message)
sys.stdout.buffer.flush()
sys.stdin.readline()
"""

# Keeps what it was told of mapped until a line comes.
RECEIVER = """
import sys, msgspec
from helmsman.rpc_server._wire.codec import decode
from helmsman.rpc_server._wire.wire import WirePayload, from_wire
array = decode(from_wire(msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=WirePayload)))
array += 1
print(int(array.sum()), flush=True)
input()
"""


@pytest.fixture(autouse=True)
def nothing_is_left_behind(mapped_before: set[str]) -> Iterator[None]:
    spares.drop()
    gc.collect()
    before = count_descriptors(), shm_files()
    yield
    spares.drop()
    gc.collect()
    assert (count_descriptors(), shm_files()) == before
    assert mapped_segments() <= mapped_before


@pytest.fixture
def mapped_before() -> set[str]:
    """Segments of earlier tests in this process, some of which may be closed at any time."""
    return mapped_segments()


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_segments() -> set[str]:
    """Addresses and names of the mappings."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "/memfd:helmsman-" in line}


def shm_files() -> set[str]:
    """Names in /dev/shm, without those of inference servers, which other tests run beside these."""
    return {
        name
        for name in os.listdir("/dev/shm")
        if "helmsman" in name and not name.startswith("helmsman-weights.")
    }


def over_the_wire(value: Any, **options: Any) -> Any:
    wire, segment = to_wire(encode(value), **options)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=WirePayload)
    try:
        return decode(from_wire(received))
    finally:
        if segment is not None:
            segment.close()


def segment_of(wire_and_segment: tuple[WirePayload, ShmSegment | None]) -> ShmSegment:
    segment = wire_and_segment[1]
    assert segment is not None
    return segment


# --- segments -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.binary(min_size=1, max_size=5000), min_size=1, max_size=20))
def test_attach_buffers_aligned(buffers: list[bytes]) -> None:
    with pack(buffers) as segment:
        views = attach(segment.location)
        assert [bytes(view) for view in views] == buffers
        assert segment.nbytes <= os.fstat(segment.location.fd).st_size
    assert all(np.frombuffer(view, np.uint8).ctypes.data % 64 == 0 for view in views)
    assert not any(view.readonly for view in views)


def test_attach_writes_stay_private() -> None:
    with pack([bytes(10_000)]) as segment:
        (first,), (second,) = attach(segment.location), attach(segment.location)
        first[:5] = b"hello"
        assert bytes(second) == bytes(10_000)
        assert bytes(attach(segment.location)[0]) == bytes(10_000)


def test_attach_views_outlive_segment(mapped_before: set[str]) -> None:
    with pack([b"a" * 5000, b"b" * 5000]) as segment:
        first, second = attach(segment.location)
    del first
    gc.collect()
    assert bytes(second[-3:]) == b"bbb"
    tensor = torch.frombuffer(second, dtype=torch.uint8)
    del second
    spares.drop()
    gc.collect()
    assert len(mapped_segments() - mapped_before) == 1
    assert torch.equal(tensor, torch.full((5000,), ord("b"), dtype=torch.uint8))


def test_attach_holds_no_descriptor() -> None:
    before = count_descriptors()
    kept = []
    for _ in range(50):
        with pack([bytes(5000)]) as segment:
            kept.append(attach(segment.location))
    spares.drop()
    assert count_descriptors() == before


def test_segment_close_and_descriptors() -> None:
    segment = pack([b"x"])
    assert not os.get_inheritable(segment.location.fd)
    assert fcntl.fcntl(segment.location.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    segment.close()
    segment.close()
    with pytest.raises(ProtocolError, match="cannot be attached"):
        attach(segment.location)


def test_segment_sealed() -> None:
    with pack([bytes(5000)]) as segment:
        fd = segment.location.fd
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, 0)
        with pytest.raises(OSError, match="not permitted"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError, match="not permitted"):
            mmap.mmap(fd, 4096, access=mmap.ACCESS_WRITE)


# --- segments that are used again -----------------------------------------------------------------


def test_segment_reused_after_close() -> None:
    with pack([b"old" * 10_000]) as segment:
        location = segment.location
    with pytest.raises(ProtocolError, match="released it"):
        attach(location)
    with pack([b"new" * 10_000]) as other:
        assert (other.location.fd, other.location.name) == (location.fd, location.name)
        with pytest.raises(ProtocolError, match="released it"):
            attach(location)
        assert bytes(attach(other.location)[0]) == b"new" * 10_000


def test_segment_mapped_by_another_process_is_not_reused() -> None:
    wire, segment = to_wire(encode(np.ones(1_000_000)))
    location = segment_of((wire, segment)).location
    command = [sys.executable, "-c", RECEIVER, msgspec.msgpack.encode(wire).hex()]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"2000000\n"
        assert decode(from_wire(wire)).sum() == 1_000_000, "what it has written is its own"
        segment_of((wire, segment)).close()
        with pack([bytes(8_000_000)]) as other:
            assert other.location.name != location.name
            process.kill()
            process.wait()
            with pack([bytes(8_000_000)]) as third:
                assert third.location.name == location.name, "a killed process has nothing mapped"


def test_pack_in_forked_child() -> None:
    pack([b"parent" * 10_000]).close()
    with pack([b"parent" * 10_000]) as open_segment:
        pid = os.fork()
        if pid == 0:
            try:
                open_segment.close()
                name = pack([b"child!" * 10_000]).location.name
                os._exit(7 if name != open_segment.location.name else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert bytes(attach(open_segment.location)[0]) == b"parent" * 10_000


def test_segment_close_in_forked_child() -> None:
    segment = pack([bytes(1 << 24)])
    pid = os.fork()
    if pid == 0:
        # some lie where its parent has the segment
        mine = [mmap.mmap(-1, 1 << 20) for _ in range(64)]
        segment.close()
        os._exit(sum(each[0] for each in mine))
    segment.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_spares_limit(monkeypatch: pytest.MonkeyPatch, mapped_before: set[str]) -> None:
    monkeypatch.setitem(segments.spares.__dict__, "_limit", 1 << 20)
    for _ in range(3):
        made = [pack([bytes(300_000)]) for _ in range(5)]
        for segment in made:
            segment.close()
        assert len(mapped_segments() - mapped_before) <= 2
    with pack([bytes(3_000_000)]) as large:
        assert large.nbytes > 1 << 20
    assert sum(memory.capacity for memory in segments.spares._kept) <= 1 << 20


@pytest.mark.parametrize("granted", [False, True])
def test_can_reuse_without_leases(
    monkeypatch: pytest.MonkeyPatch, mapped_before: set[str], granted: bool
) -> None:
    """As on a kernel that has none, or grants one on what somebody has mapped."""
    monkeypatch.setattr(segments, "_is_exclusive", lambda fd: granted)
    segments._leases_tell.cache_clear()
    try:
        assert not can_reuse()
        for number in range(3):
            with pack([bytes([number]) * 100_000]) as segment:
                assert bytes(attach(segment.location)[0]) == bytes([number]) * 100_000
            assert mapped_segments() <= mapped_before
    finally:
        segments._leases_tell.cache_clear()


# --- what is refused ------------------------------------------------------------------------------


def changed(location: SegmentLocation, **fields: Any) -> SegmentLocation:
    return msgspec.structs.replace(location, **fields)


def test_attach_recycled_descriptor() -> None:
    with pack([b"old"]) as segment:
        location = segment.location
    spares.drop()
    with pack([b"new"]) as other:
        assert other.location.fd == location.fd
        with pytest.raises(ProtocolError, match="now is /memfd:helmsman-"):
            attach(location)


@pytest.mark.parametrize(
    "fields",
    [
        {"offsets": [8192]},
        {"offsets": [-64]},
        {"sizes": [-1]},
        {"sizes": [10**6]},
        {"size": 64},
        {"size": 0},
        {"size": 10**6},
        {"offsets": [0]},
        {"offsets": [], "sizes": []},
    ],
)
def test_attach_location_that_does_not_fit(fields: dict[str, Any]) -> None:
    with pack([bytes(5000)]) as segment, pytest.raises(ProtocolError, match="do not fit"):
        attach(changed(segment.location, **fields))


def test_attach_other_files(tmp_path: Path) -> None:
    with pack([bytes(5000)]) as segment:
        (tmp_path / "file").write_bytes(bytes(5000))
        os.mkfifo(tmp_path / "fifo")
        fds = [
            os.open(tmp_path / "file", os.O_RDWR),
            os.open(tmp_path / "fifo", os.O_RDWR),
            os.memfd_create("helmsman-unsealed"),
        ]
        fds.append(os.memfd_create(segment.location.name))
        try:
            for fd in fds:
                with pytest.raises(ProtocolError, match="now is|not sealed"):
                    attach(changed(segment.location, fd=fd))
        finally:
            for fd in fds:
                os.close(fd)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_attach_segment_of_another_user() -> None:
    code = OWNER.replace("wire, segment", "import os; os.setuid(12345)\nwire, segment", 1)
    with owner(code) as process:
        wire = received_from(process)
        with pytest.raises(ProtocolError, match="belongs to user 12345"):
            from_wire(wire)


def test_from_wire_buffer_missing() -> None:
    wire, _ = to_wire(encode([torch.zeros(2000), torch.zeros(2000)]))
    wire.inline.pop()
    with pytest.raises(ProtocolError, match="2 buffers came with 1"):
        from_wire(wire)


# --- payloads -------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 3000), max_size=12),
    st.sampled_from([64, 1024, 4096, 1 << 20]),
    st.sampled_from([0, 1024]),
    st.booleans(),
)
def test_from_wire_any_spread_of_buffers(
    lengths: list[int], threshold: int, inband_below: int, long: bool
) -> None:
    value = (
        [torch.arange(length) for length in lengths],
        list(range(3000 if long else 3)),
        np.arange(sum(lengths)),
    )
    wire, segment = to_wire(encode(value, inband_below=inband_below), threshold=threshold)
    tensors, numbers, array = decode(
        from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=WirePayload))
    )
    if segment is not None:
        segment.close()
    assert all(
        torch.equal(got, torch.arange(length)) for got, length in zip(tensors, lengths, strict=True)
    )
    assert numbers == value[1]
    assert np.array_equal(array, value[2])
    array += 1
    for tensor in tensors:
        tensor.add_(1)


def test_to_wire_small_inline_large_in_segment() -> None:
    wire, segment = to_wire(encode([torch.zeros(2000), torch.zeros(100)]))
    assert segment is None
    assert [len(each) for each in wire.inline] == [8000]
    wire, segment = to_wire(encode([torch.zeros(2000), torch.zeros(100_000), torch.zeros(200_000)]))
    assert segment is not None
    assert (wire.is_inline, wire.segment) == ([True, False, False], segment.location)
    assert segment.location.sizes == [400_000, 800_000]
    assert len(msgspec.msgpack.encode(wire)) < 9000
    segment.close()
    wire, segment = to_wire(encode(list(range(100_000))))
    assert segment is not None
    assert len(msgspec.msgpack.encode(wire)) < 200
    assert decode(from_wire(wire)) == list(range(100_000))
    segment.close()


def test_to_wire_many_small_buffers() -> None:
    value = [torch.full((10_000,), float(number)) for number in range(200)]
    wire, segment = to_wire(encode(value))
    assert len(msgspec.msgpack.encode(wire)) < 1_200_000
    got = decode(from_wire(wire))
    segment_of((wire, segment)).close()
    assert all(torch.equal(*pair) for pair in zip(got, value, strict=True))


def test_to_wire_copies_buffers() -> None:
    tensors = [torch.zeros(2000), torch.zeros(100_000)]
    wire, segment = to_wire(encode(tensors))
    for tensor in tensors:
        tensor.add_(1)
    got = decode(from_wire(wire))
    segment_of((wire, segment)).close()
    assert not got[0].any()
    assert not got[1].any()


def test_from_wire_maps_large_tensors() -> None:
    got = over_the_wire(torch.arange(1_000_000))
    address = got.data_ptr()
    lines = [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/memfd:helmsman-" in line
    ]
    spans = [[int(part, 16) for part in line.split()[0].split("-")] for line in lines]
    assert any(start <= address < end for start, end in spans)


def test_from_wire_handle_types() -> None:
    handle = ResultHandle(
        id="h", worker_id="actor/0", location=("path", (1, b"2")), nbytes=1, summary="int"
    )
    assert over_the_wire([handle]) == [handle]
    assert type(over_the_wire([handle])[0].location[1]) is tuple


def test_to_wire_forwards_views() -> None:
    payload = encode([torch.arange(100_000), "x" * 100_000])
    wire, segment = to_wire(Payload(memoryview(payload.data), payload.buffers, []))
    forwarded, second = to_wire(from_wire(wire))
    segment_of((wire, segment)).close()
    got = decode(from_wire(forwarded))
    segment_of((forwarded, second)).close()
    assert torch.equal(got[0], torch.arange(100_000))
    assert got[1] == "x" * 100_000


def test_to_wire_without_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "HAS_SEGMENTS", False)
    value = [torch.arange(100_000), "x" * 100_000]
    wire, segment = to_wire(encode(value))
    assert segment is None
    got = decode(from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=WirePayload)))
    assert torch.equal(got[0], value[0])  # type: ignore[arg-type]
    assert got[1] == value[1]


# --- processes ------------------------------------------------------------------------------------


@contextlib.contextmanager
def owner(code: str = OWNER) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds a segment until it is told to end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def received_from(process: subprocess.Popen[bytes]) -> WirePayload:
    assert process.stdout is not None
    length = int.from_bytes(process.stdout.read(4), "big")
    return msgspec.msgpack.decode(process.stdout.read(length), type=WirePayload)


def test_from_wire_sender_killed() -> None:
    with owner() as process:
        wire = received_from(process)
        got = decode(from_wire(wire))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert np.array_equal(got, np.arange(1_000_000))
        got += 1
        assert np.array_equal(got, np.arange(1, 1_000_001))
        with pytest.raises(ProtocolError, match="can no longer be opened") as caught:
            from_wire(wire)
    assert str(process.pid) in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).location == wire.segment
