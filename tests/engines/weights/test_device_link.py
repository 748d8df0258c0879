"""Test the two buffers that a trainer rank shares with processes on its device, by threads."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from helmsman.api.weights import DeviceTarget, WeightFormat
from helmsman.engines._models.distributed import join_process_group, leave_process_group
from helmsman.engines._weights.device_link import connect_to
from helmsman.engines._weights.gathering import gather
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines._weights.shared_memory import DeviceSharingError, open_buffer
from helmsman.engines.weight_transfer import incoming, publish
from tests.engines.test_weight_transfer import CPU, members, read, sockets

SIZE = 1 << 20
TENSORS = {f"w{index}": torch.full((SIZE // 4,), float(index)) for index in range(8)}
FORM = WeightFormat(bucket_bytes=SIZE)
"""A bucket for each tensor."""


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    assert join_process_group(rendezvous_timeout_s=60, collective_timeout_s=60)
    yield
    leave_process_group()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that a test leaves no memory, mapped or open, and no socket."""
    gc.collect()
    before = held()
    yield
    gc.collect()
    assert held() == before


def held() -> list[str]:
    """Return the shared memory that this process has open or mapped, and its Unix sockets."""
    links = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
    sockets = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    ours = [each for each in links if each.strip("socket:[]") in sockets]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return sorted([*ours, *(each for each in [*links, *mapped] if "helmsman-weights" in each)])


def buffer_sizes() -> list[int]:
    """Return the sizes of the files in memory that this process has open."""
    found: dict[int, int] = {}
    for entry in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{entry}"
        with contextlib.suppress(OSError):
            if "memfd:helmsman-weights" in os.readlink(path):
                found[os.stat(path).st_ino] = os.stat(path).st_size
    return list(found.values())


class Gathering:
    """Gathers tensors, and lets other threads wait for a number of gathers."""

    def __init__(self, fails_at: int = 0) -> None:
        self._changed, self.num, self._fails_at = threading.Condition(), 0, fails_at

    def __call__(
        self, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None
    ) -> Iterator[torch.Tensor]:
        with self._changed:
            self.num += 1
            self._changed.notify_all()
        if self.num == self._fails_at:
            raise RuntimeError("a rank has left")
        return gather(tensors, dtype)

    def wait(self, num: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num >= num, 60)


def send(
    target: Any, group: WeightGroup, tensors: Mapping[str, torch.Tensor] = TENSORS, **options: Any
) -> Any:
    options = {"version": 1, "form": FORM, "is_root": True, **options}
    form = options.pop("form")
    try:
        return publish(tensors, target, form, group=group, **options)
    finally:
        group.close_socket()


def require_all(found: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_sender_alternates_two_buffers() -> None:
    """The sender has at most two buffers of the size of a bucket."""
    groups, (place, own) = sockets(1)
    gathering = Gathering()

    def load() -> None:
        with incoming(own, groups[1]) as arriving:
            buckets = iter(arriving)
            next(buckets)
            # The fourth gather starts once the second bucket is in its buffer.
            gathering.wait(4)
            assert buffer_sizes() == [SIZE, SIZE]
            assert gathering.num == 4
            found = {name: tensor.clone() for bucket in buckets for name, tensor in bucket.items()}
        require_all({"w0": TENSORS["w0"], **found})

    with concurrent.futures.ThreadPoolExecutor() as threads:
        loading = threads.submit(load)
        assert send(place, groups[0], gather=gathering) == len(TENSORS) * SIZE
        loading.result(60)


def test_broadcast_overlaps_gathering() -> None:
    (first, _), places = members(2)
    gathering = Gathering()

    class Slow(WeightGroup):
        """Receives no bucket before the one after the next is gathered."""

        num_received = 0

        def receive(self, num_bytes: int) -> torch.Tensor:
            self.num_received += 1
            gathering.wait(min(self.num_received + 2, 3))
            return super().receive(num_bytes)

    large = {name: torch.ones(4 << 20) for name in ("a", "b", "c")}
    second = Slow(CPU)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        reading = threads.submit(read, places[1], second)
        form = WeightFormat(bucket_bytes=16 << 20)
        send(places[0], first, large, gather=gathering, form=form)
        assert reading.result(60).keys() == large.keys()
    for group in (first, second):
        group.close()


def test_receiver_failure_keeps_other_receivers() -> None:
    groups, (place, *own) = sockets(2)

    def fail() -> None:
        with incoming(own[0], groups[1]) as arriving:
            next(iter(arriving))
            raise ZeroDivisionError

    with concurrent.futures.ThreadPoolExecutor() as threads:
        failing, reading = threads.submit(fail), threads.submit(read, own[1], groups[2])
        assert send(place, groups[0]) == len(TENSORS) * SIZE
        with pytest.raises(ZeroDivisionError):
            failing.result(60)
        require_all(reading.result(60))


def test_receiver_left_out_is_not_awaited() -> None:
    groups, (place, *own) = sockets(2)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        reading = threads.submit(read, own[1], groups[2])
        groups[0].leave_out(own[0])
        send(place, groups[0])
        require_all(reading.result(60))
    groups[0].leave_out(own[0])  # the sync is over


def test_receiver_late_is_left_out() -> None:
    groups, (place, *own) = sockets(2, timeout_s=2.0)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        reading = threads.submit(read, own[1], groups[2])
        send(place, groups[0])
        require_all(reading.result(60))
        with pytest.raises(ConnectionError, match="does not listen for receivers of weights"):
            read(own[0], groups[1])


@pytest.mark.parametrize("change", [{"key": "another"}, {"receiver": "rollout/9"}])
def test_socket_refuses_others(change: dict[str, str]) -> None:
    groups, (place, own) = sockets(1)
    other = msgspec.structs.replace(own, **change)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        refused = connect_to(other, place.sockets[0])
        reading = threads.submit(read, own, groups[1])
        send(place, groups[0])
        require_all(reading.result(60))
        with pytest.raises((EOFError, OSError)):
            refused.recv_bytes()
        refused.close()


def test_sender_failure_is_reported() -> None:
    for options, message in (
        ({"version": 2}, "could not send its weights: ValueError: .*weight version 2"),
        ({"gather": Gathering(fails_at=4)}, "could not send its weights: RuntimeError: a rank"),
    ):
        groups, (place, own) = sockets(1)
        with concurrent.futures.ThreadPoolExecutor() as threads:
            reading = threads.submit(read, own, groups[1])
            with pytest.raises((ValueError, RuntimeError)):
                send(place, groups[0], **options)
            with pytest.raises(RuntimeError, match=message):
                reading.result(60)


def test_sender_end_is_detected() -> None:
    """The end of a sender is detected before it has met its receivers, too."""
    groups, (_, own) = sockets(1, timeout_s=600.0)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        link = connect_to(own, own.sockets[0])
        reading = threads.submit(read, own, groups[1])
        groups[0].close()
        with pytest.raises(ConnectionError, match="the trainer rank on this device"):
            reading.result(60)
        link.close()


def test_open_buffer_not_shareable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system does not let this process open the memory of a handle."""
    import pickle

    with pytest.raises(DeviceSharingError, match="cannot share memory of their device"):
        open_buffer(pickle.dumps("/proc/self/fd/nothing"), CPU)

    def forbidden(*_: Any) -> Any:
        raise OSError("Operation not permitted")

    groups, (place, own) = sockets(1)
    monkeypatch.setattr(os, "memfd_create", forbidden)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        reading = threads.submit(read, own, groups[1])
        with pytest.raises(DeviceSharingError, match="Operation not permitted"):
            send(place, groups[0])
        with pytest.raises(ConnectionError, match="has exited, or has given up"):
            reading.result(60)


def test_target_survives_its_encoding() -> None:
    """vLLM passes plain types to its ranks."""
    _, (_, own) = sockets(1)
    assert msgspec.convert(msgspec.to_builtins(own), DeviceTarget) == own
