"""Tests of shared-memory segments: contents, bounds of memory, refusals, and the end of a peer."""

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
from hypothesis import given, settings
from hypothesis import strategies as st

from helmsman._wire import segments
from helmsman._wire import wire as wire_module
from helmsman._wire.codec import Payload, ResultHandle, decode, encode
from helmsman._wire.segments import attach, can_reuse, pack, spares
from helmsman._wire.wire import WirePayload, from_wire, to_wire
from helmsman.api.errors import ProtocolError

pytestmark = pytest.mark.skipif(not segments.HAS_SEGMENTS, reason="no memfd on this system")

OWNER = """
import sys, msgspec, numpy
from helmsman._wire.codec import encode
from helmsman._wire.wire import to_wire
wire, segment = to_wire(encode(numpy.arange(1_000_000)))
message = msgspec.msgpack.encode(wire)
sys.stdout.buffer.write(len(message).to_bytes(4, "big") + message)
sys.stdout.buffer.flush()
sys.stdin.readline()
"""
"""Packs an array, prints its location, and keeps the segment until it reads a line."""

RECEIVER = """
import sys, msgspec
from helmsman._wire.codec import decode
from helmsman._wire.wire import WirePayload, from_wire
array = decode(from_wire(msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=WirePayload)))
array += 1
print(int(array.sum()), flush=True)
input()
"""
"""Maps an array, changes it, and keeps it mapped until it reads a line."""


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_segments() -> set[str]:
    """Return addresses and names of the mappings."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "/memfd:helmsman-" in line}


@pytest.fixture
def mapped_before() -> set[str]:
    """Segments that earlier tests of this process have mapped."""
    return mapped_segments()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(mapped_before: set[str]) -> Iterator[None]:
    spares.drop()
    gc.freeze()  # collections then visit only objects of the test
    before = count_descriptors()
    yield
    spares.drop()
    gc.collect()
    assert count_descriptors() == before
    assert mapped_segments() <= mapped_before


@contextlib.contextmanager
def running(code: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
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


def over_the_wire(value: Any, **options: Any) -> Any:
    """Return the value as a receiver decodes it, after the sender has closed its segment."""
    wire, segment = to_wire(encode(value), **options)
    payload = from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=WirePayload))
    if segment is not None:
        segment.close()
    return decode(payload)


# --- segments -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.binary(min_size=1, max_size=5000), min_size=1, max_size=20))
def test_attach_buffers_aligned_and_writable(buffers: list[bytes]) -> None:
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
        assert bytes(second) == bytes(attach(segment.location)[0]) == bytes(10_000)


def test_attach_views_outlive_segment(mapped_before: set[str]) -> None:
    before = count_descriptors()
    with pack([b"a" * 5000, b"b" * 5000]) as segment:
        first, second = attach(segment.location)
    del first
    spares.drop()
    gc.collect()
    assert len(mapped_segments() - mapped_before) == 1
    assert count_descriptors() == before
    assert bytes(second) == b"b" * 5000


def test_segment_close_ends_access() -> None:
    segment = pack([b"x"])
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


# --- reuse ----------------------------------------------------------------------------------------


def test_segment_reused_after_close() -> None:
    with pack([b"old" * 10_000]) as segment:
        location = segment.location
    with pack([b"new" * 10_000]) as other:
        assert (other.location.fd, other.location.name) == (location.fd, location.name)
        with pytest.raises(ProtocolError, match="released it"):
            attach(location)
        assert bytes(attach(other.location)[0]) == b"new" * 10_000


def test_segment_mapped_by_another_process_is_not_reused() -> None:
    wire, segment = to_wire(encode(np.ones(1_000_000)))
    assert segment is not None
    with running(RECEIVER, msgspec.msgpack.encode(wire).hex()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"2000000\n"
        assert decode(from_wire(wire)).sum() == 1_000_000, "the receiver changed only its own copy"
        segment.close()
        with pack([bytes(8_000_000)]) as other:
            assert other.location.name != segment.location.name
            process.kill()
            process.wait()
            with pack([bytes(8_000_000)]) as third:
                assert third.location.name == segment.location.name


def test_segments_in_forked_child() -> None:
    """The child has segments of its own, and its close leaves those of the parent as they are."""
    pack([b"spare" * 10_000]).close()
    with pack([b"parent" * 10_000]) as segment:
        pid = os.fork()
        if pid == 0:
            try:
                maps = [mmap.mmap(-1, 1 << 20) for _ in range(64)]  # may lie at the same addresses
                segment.close()
                name = pack([b"child!" * 10_000]).location.name
                os._exit(name == segment.location.name or sum(each[0] for each in maps))
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert bytes(attach(segment.location)[0]) == b"parent" * 10_000


def test_spares_limit(monkeypatch: pytest.MonkeyPatch, mapped_before: set[str]) -> None:
    monkeypatch.setitem(segments.spares.__dict__, "_limit", 1 << 20)
    for _ in range(3):
        made = [pack([bytes(300_000)]) for _ in range(5)]
        for segment in made:
            segment.close()
        assert len(mapped_segments() - mapped_before) <= 2
    pack([bytes(3_000_000)]).close()
    assert len(mapped_segments() - mapped_before) <= 2


@pytest.mark.parametrize("granted", [False, True])
def test_can_reuse_without_leases(
    monkeypatch: pytest.MonkeyPatch, mapped_before: set[str], granted: bool
) -> None:
    """The kernel has no leases, or grants one on a file that another process has mapped."""
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


def test_signal_during_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler's TimeoutError is an OSError without a number, and no answer of the kernel."""

    def interrupted(*args: object) -> None:
        raise TimeoutError("the user's alarm")

    monkeypatch.setattr("fcntl.fcntl", interrupted)
    with pytest.raises(TimeoutError, match="the user's alarm"):
        segments._is_exclusive(0)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        *({"offsets": [8192]}, {"offsets": [-64]}, {"offsets": [0]}),
        *({"sizes": [-1]}, {"sizes": [10**6]}, {"offsets": [], "sizes": []}),
        *({"size": 64}, {"size": 0}, {"size": 10**6}),
    ],
    ids=str,
)
def test_attach_invalid_location(fields: dict[str, Any]) -> None:
    with pack([bytes(5000)]) as segment, pytest.raises(ProtocolError, match="do not fit"):
        attach(msgspec.structs.replace(segment.location, **fields))


def test_attach_other_files(tmp_path: Path) -> None:
    with pack([bytes(5000)]) as segment, contextlib.ExitStack() as files:
        (tmp_path / "file").write_bytes(bytes(5000))
        os.mkfifo(tmp_path / "fifo")
        for fd in (
            os.open(tmp_path / "file", os.O_RDWR),
            os.open(tmp_path / "fifo", os.O_RDWR),
            os.memfd_create("helmsman-unsealed"),
            os.memfd_create(segment.location.name),
        ):
            files.callback(os.close, fd)
            with pytest.raises(ProtocolError, match="now is|not sealed"):
                attach(msgspec.structs.replace(segment.location, fd=fd))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
def test_attach_segment_of_another_user() -> None:
    code = OWNER.replace("wire, segment", "import os; os.setuid(12345)\nwire, segment", 1)
    with running(code) as process:
        wire = received_from(process)
        with pytest.raises(ProtocolError, match="belongs to user 12345"):
            from_wire(wire)


def test_from_wire_buffer_missing() -> None:
    wire, _ = to_wire(encode([np.zeros(1000), np.zeros(1000)]))
    wire.inline.pop()
    with pytest.raises(ProtocolError, match="2 buffers came with 1"):
        from_wire(wire)


def test_from_wire_sender_killed() -> None:
    """Received values stay valid, and the others are refused."""
    with running(OWNER) as process:
        wire = received_from(process)
        got = decode(from_wire(wire))
        process.send_signal(signal.SIGKILL)
        process.wait()
        got += 1
        assert np.array_equal(got, np.arange(1, 1_000_001))
        with pytest.raises(ProtocolError, match="can no longer be opened") as caught:
            from_wire(wire)
    assert str(process.pid) in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).location == wire.segment


# --- payloads -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 3000), max_size=12),
    st.sampled_from([64, 1024, 4096, 1 << 20]),
    st.sampled_from([3, 3000]),
)
def test_from_wire_any_spread_of_buffers(lengths: list[int], threshold: int, count: int) -> None:
    arrays, numbers = over_the_wire(
        ([np.arange(length) for length in lengths], list(range(count))), threshold=threshold
    )
    assert [each.tolist() for each in arrays] == [list(range(length)) for length in lengths]
    assert all(each.flags.writeable for each in arrays)
    assert numbers == list(range(count))


@pytest.mark.parametrize(
    ("value", "max_inline_bytes"),
    [
        ([np.zeros(1000), np.zeros(50_000), np.zeros(100_000)], 9000),
        (list(range(100_000)), 200),
        ([np.full(5000, float(number)) for number in range(200)], 1_200_000),
    ],
    ids=["large arrays", "long list", "many arrays"],
)
def test_to_wire_large_values_in_segment(value: Any, max_inline_bytes: int) -> None:
    wire, segment = to_wire(encode(value))
    assert segment is not None
    assert len(msgspec.msgpack.encode(wire)) < max_inline_bytes
    got = decode(from_wire(wire))
    segment.close()
    assert all(np.array_equal(*pair) for pair in zip(got, value, strict=True))


def test_to_wire_copies_buffers() -> None:
    """The sender may change a value as soon as it is packed."""
    arrays = [np.zeros(1000), np.zeros(50_000)]
    wire, segment = to_wire(encode(arrays))
    assert segment is not None
    for array in arrays:
        array += 1
    got = decode(from_wire(wire))
    segment.close()
    assert not any(each.any() for each in got)


def test_from_wire_maps_large_arrays(mapped_before: set[str]) -> None:
    got = over_the_wire(np.arange(1_000_000))
    lines = mapped_segments() - mapped_before
    spans = [[int(part, 16) for part in line.split()[0].split("-")] for line in lines]
    assert any(start <= got.ctypes.data < end for start, end in spans)


def test_from_wire_handle_types() -> None:
    handle = ResultHandle(
        id="h", worker_id="actor/0", location=("path", (1, b"2")), nbytes=1, summary="int"
    )
    (got,) = over_the_wire([handle])
    assert got == handle
    assert type(got.location[1]) is tuple


def test_to_wire_forwards_views() -> None:
    payload = encode([np.arange(100_000), "x" * 100_000])
    wire, first = to_wire(Payload(memoryview(payload.data), payload.buffers, []))
    forwarded, second = to_wire(from_wire(wire))
    assert first is not None
    assert second is not None
    first.close()
    array, text = decode(from_wire(forwarded))
    second.close()
    assert np.array_equal(array, np.arange(100_000))
    assert text == "x" * 100_000


def test_to_wire_without_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "HAS_SEGMENTS", False)
    assert to_wire(encode(np.arange(100_000)))[1] is None
    array, text = over_the_wire([np.arange(100_000), "x" * 100_000])
    assert np.array_equal(array, np.arange(100_000))
    assert text == "x" * 100_000
