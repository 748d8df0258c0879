"""Tests of the functions that copy and map memory."""

from __future__ import annotations

import gc
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

from helmsman._wire import memory
from helmsman._wire.memory import CopySpan, address_of, copy, own_copy


@pytest.mark.parametrize(
    "size", [0, 1, 4096, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, (9 << 20) + 12345]
)
def test_own_copy_sizes(size: int) -> None:
    data = random.Random(size).randbytes(size)
    made = own_copy(memoryview(data))
    assert bytes(made) == data
    if size:
        made[0] = (data[0] + 1) % 256
        assert bytes(made) != data
        numpy.frombuffer(made, numpy.uint8)[-1] = 0


def test_own_copy_memory_freed() -> None:
    def mapped() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")

    gc.freeze()  # collections then visit only new objects
    data = bytes(16 << 20)
    own_copy(data)
    before = mapped()
    for _ in range(20):
        own_copy(data)
    assert mapped() - before < 16 << 20


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_copy_spans_of_all_sizes(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    monkeypatch.setattr(memory, "_num_threads", lambda num_bytes: num_threads)
    rng = random.Random(num_threads)
    sources = [
        rng.randbytes(rng.choice([1, 64, 4096, (1 << 20) - 1, 1 << 20, (3 << 20) + 7]))
        for _ in range(20)
    ]
    targets = [bytearray(len(source)) for source in sources]
    spans = [
        CopySpan(address_of(memoryview(target)), address_of(memoryview(source)), len(source))
        for target, source in zip(targets, sources, strict=True)
    ]
    copy(spans)
    assert targets == sources


def test_own_copy_in_many_threads() -> None:
    sources = [random.Random(number).randbytes(5 << 20) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert [bytes(made) for made in pool.map(own_copy, sources)] == sources


def test_own_copy_in_forked_child() -> None:
    data = bytes(range(256)) * (20 << 10)
    own_copy(data)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if bytes(own_copy(data)) == data else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_in_parallel_interrupted() -> None:
    """The threads have ended when the exception is raised, since the caller then frees memory."""
    source, target = numpy.ones(1 << 26, numpy.uint8), numpy.zeros(1 << 26, numpy.uint8)
    begun, ended = threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        for _ in range(8):
            memory._copy([CopySpan(target.ctypes.data, source.ctypes.data, source.nbytes)])
        ended.set()

    def interrupted() -> None:
        begun.wait()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        memory._in_parallel([interrupted, copy])
    assert ended.is_set()
