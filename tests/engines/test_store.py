"""Test the store of a group: values, waits, errors, and processes without its key."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helmsman._wire.group_keys import KEY_VARIABLE, group_key
from helmsman.engines._models.distributed import join_process_group, leave_process_group
from helmsman.engines._models.store import GroupStore, StoreServer, listen, meet
from tests.engines.ranks import free_port, run_ranks

PLAIN = "plain:secret"


@contextlib.contextmanager
def opened(key: str, timeout_s: float = 30.0) -> Iterator[tuple[GroupStore, int]]:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    store = GroupStore("127.0.0.1", port, key, timeout_s, StoreServer(listener, key))
    try:
        yield store, port
    finally:
        store.close()


@pytest.mark.parametrize("key", [PLAIN, "tls:secret"])
def test_store_verbs(key: str) -> None:
    with opened(key) as (store, port):
        other = GroupStore("127.0.0.1", port, key, 30.0)
        store.set("a", "text")
        store.set("large", "x" * (1 << 20))
        assert (other.get("a"), len(other.get("large"))) == (b"text", 1 << 20)
        assert (store.add("n", 2), other.add("n", 3), store.get("n")) == (2, 5, b"5")
        assert (other.check(["a", "n"]), other.check(["a", "b"])) == (True, False)
        assert other.compare_set("b", "", "1") == b"1"
        assert other.compare_set("b", "2", "3") == b"1"
        assert (store.delete_key("b"), store.delete_key("b")) == (True, False)
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            waiting = [threads.submit(other.get, "late") for _ in range(3)]
            dist.PrefixStore("p", store).set("late", "x")
            store.set("late", b"y")
            assert {each.result(30) for each in waiting} == {b"y"}
        assert other.get("p/late") == b"x"
        other.close()


def test_store_wait_is_limited() -> None:
    with opened(PLAIN) as (store, port):
        with pytest.raises(dist.DistStoreError, match=f"b was not set within 0.01 s .*:{port}"):
            store.wait(["b"], timedelta(seconds=0.01))
        store.set("b", "")
        store.wait(["b"], timedelta(0))


@pytest.mark.parametrize("key", ["plain:other", "tls:secret", ""])
def test_store_refuses_other_key(key: str) -> None:
    with (
        opened(PLAIN) as (_, port),
        pytest.raises(dist.DistNetworkError, match=f"no store of this group at 127.0.0.1:{port}"),
    ):
        GroupStore("127.0.0.1", port, key, 0.1)


def test_store_of_ended_rank() -> None:
    with opened(PLAIN) as (_, port):
        other = GroupStore("127.0.0.1", port, PLAIN, 30.0)
    for _ in range(2):
        with pytest.raises(dist.DistNetworkError, match="process of rank 0 has ended|no store"):
            other.check(["a"])
    other.close()
    with pytest.raises(dist.DistNetworkError, match="has left the group"):
        other.set("a", "")


def test_meet_names_missing_ranks() -> None:
    with pytest.raises(TimeoutError, match="ranks 1, 2 did not join"):
        meet("127.0.0.1", free_port(), PLAIN, rank=0, world_size=3, timeout_s=0.2)


@pytest.mark.parametrize("ends", ["before the answer", "after the answer"])
def test_meet_while_the_last_group_ends(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that comes back at once reaches the store of the group that it has just left."""
    came, ask = threading.Event(), GroupStore.compare_set
    met = functools.partial(meet, "127.0.0.1", free_port(), PLAIN, world_size=2, timeout_s=30.0)

    def asked(store: GroupStore, *given: Any) -> bytes:
        if not came.is_set() and ends == "before the answer":
            came.set()
            first.close()
        try:
            return ask(store, *given)
        finally:
            came.set()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(met, rank=1)
        first = met(rank=0)
        other.result().close()
        monkeypatch.setattr(GroupStore, "compare_set", asked)
        other = pool.submit(met, rank=1)
        assert came.wait(20)
        first.close()
        monkeypatch.undo()
        second = met(rank=0)
        second.set("a", "b")
        assert other.result().get("a") == b"b"
        other.result().close()
        second.close()


def test_group_key() -> None:
    keys = {group_key("a", ["10.0.0.1"]), group_key("a", ["10.0.0.1", "10.0.0.2"])}
    assert {key.partition(":")[0] for key in keys} == {"plain", "tls"}
    assert group_key("a", ["10.0.0.1"]) in keys
    assert group_key("b", ["10.0.0.1"]) not in keys


def joined(key: str) -> list[float]:
    os.environ[KEY_VARIABLE] = key
    sums = []
    for _ in range(2):  # the port and the key may be used again
        group = join_process_group(rendezvous_timeout_s=60.0, collective_timeout_s=60.0)
        values = torch.ones(3)
        dist.all_reduce(values, group=dist.new_group())
        sums.append(values.sum().item())
        dist.barrier()
        leave_process_group(group)
    return sums


@pytest.mark.parametrize("key", [PLAIN, "tls:secret"])
def test_ranks_join_again(key: str) -> None:
    assert run_ranks(joined, 3, key) == [[9.0, 9.0]] * 3
