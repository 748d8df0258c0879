"""Calls of a Cluster from other processes, by its handle."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from helmsman.api import errors
from helmsman.api.batch import Batch
from helmsman.api.dispatch import Shard
from helmsman.api.worker_group import ClusterConfig
from helmsman.controller._groups.cluster import Cluster
from helmsman.controller._groups.cluster_handle import ClusterHandle
from helmsman.controller._groups.resource_manager import ResourceManager
from tests.contract.group_workers import Member
from tests.contract.groups import ON_CPU
from tests.contract.helpers import LIMIT_S, ROOT


class Elsewhere:
    """Another process, which holds an object and calls functions with it."""

    def __init__(self, held: Any) -> None:
        program = (
            "import sys, pickle, cloudpickle\n"
            "held = pickle.load(sys.stdin.buffer)\n"
            "while True:\n"
            "    try: function = pickle.load(sys.stdin.buffer)\n"
            "    except EOFError: break\n"
            "    try: result = function(held)\n"
            "    except Exception as error: result = error\n"
            "    sys.stdout.buffer.write(cloudpickle.dumps(result)); sys.stdout.buffer.flush()\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._send(pickle.dumps(held))

    def _send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def begin(self, function: Callable[[Any], Any]) -> None:
        self._send(cloudpickle.dumps(function))

    def result(self) -> Any:
        assert self.process.stdout is not None
        result = pickle.load(self.process.stdout)
        if isinstance(result, Exception):
            raise result
        return result

    def call(self, function: Callable[[Any], Any]) -> Any:
        self.begin(function)
        return self.result()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.communicate(timeout=LIMIT_S)


def start(resources: ResourceManager, name: str) -> Cluster[Member]:
    """Start a group of 2 dp x 2 tp."""
    config = ClusterConfig(device_mapping="0-3", tp_size=2, num_cpus=0.5, env_vars=ON_CPU)
    return Cluster(name, Member, resources, config)


@pytest.fixture(scope="module", params=[None, "127.0.0.1"], ids=["unix", "tcp"])
def elsewhere(resources: ResourceManager, request: pytest.FixtureRequest) -> Iterator[Elsewhere]:
    """Provide another process that holds a handle."""
    name = f"handled-{'tcp' if request.param else 'unix'}"
    with start(resources, name) as cluster:
        handle = cluster.handle(address=request.param)
        assert isinstance(handle.address.where, str) == (request.param is None)
        process = Elsewhere(handle)
        yield process
        process.close()


def test_handle_calls_by_name(elsewhere: Elsewhere) -> None:
    assert elsewhere.call(lambda handle: handle.execute_all_sync("echo", 5)) == [5] * 4
    assert elsewhere.call(lambda handle: handle.execute_rank_zero_sync("rank_at_start")) == 0
    assert elsewhere.call(lambda handle: handle.execute_on([3, 1], "rank_at_start")) == [3, 1]
    assert elsewhere.call(
        lambda handle: handle.execute_all_sync("echo", Shard([1, 2, 3, 4]), timeout=60)
    ) == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert elsewhere.call(
        lambda handle: [part.result() for part in handle.execute_on_async([2, 0], "rank_at_start")]
    ) == [2, 0]
    assert elsewhere.call(lambda handle: (handle.world_size, handle.dp_size, handle.tp_size)) == (
        4,
        2,
        2,
    )
    assert elsewhere.call(lambda handle: handle.get_rank_info(3).tp_rank) == 1


def test_handle_calls_declared_methods(elsewhere: Elsewhere) -> None:
    batch = Batch({"x": np.arange(4)})
    found = elsewhere.call(lambda handle: handle.method(Member.add)(batch, number=10))
    assert found["x"].tolist() == [10, 11, 12, 13] and found["rank"] == [0, 0, 2, 2]
    assert elsewhere.call(lambda handle: handle.method(Member.summed)([1, 2, 3, 4])) == 10
    assert elsewhere.call(lambda handle: handle.method(Member.custom)([1, 2, 3, 4])) == 10
    assert elsewhere.call(lambda handle: handle.method(Member.rank_of_zero)()) == 0
    assert (
        elsewhere.call(
            lambda handle: handle.method(Member.echo).options(timeout=60).submit(1).result(60)
        )
        == [1] * 4
    )


def test_handle_carries_large_values(elsewhere: Elsewhere) -> None:
    size = 3 << 20
    same = elsewhere.call(
        lambda handle: [
            np.array_equal(each, np.arange(size))
            for each in handle.execute_on([0, 3], "echo", np.arange(size))
        ]
    )
    assert same == [True, True]


def test_handle_calls_begin_in_order(elsewhere: Elsewhere) -> None:
    def many(handle: Any) -> list[int]:
        before = handle.execute_rank_zero_sync("steps")
        futures = []
        for number in range(20):
            big = np.zeros((1 << 17) if number % 3 else 1)
            futures.append(handle.method(Member.rank_of_zero).submit())
            futures.append(handle.execute_rank_zero_async("steps"))
            futures.append(handle.execute_rank_zero_async("echo", big))
        return [future.result() - before for future in futures[1::3]]

    assert elsewhere.call(many) == list(range(1, 21))


def test_handle_errors_of_cluster(elsewhere: Elsewhere) -> None:
    with pytest.raises(errors.GroupCallError, match="failed on 2 of 4 ranks") as caught:
        elsewhere.call(lambda handle: handle.method(Member.fail_on)([1, 2], "no room"))
    assert "no room" in str(caught.value) and caught.value.first.worker_id in (  # type: ignore[attr-defined]
        "handled-unix/1",
        "handled-unix/2",
        "handled-tcp/1",
        "handled-tcp/2",
    )
    with pytest.raises(errors.UnevenBatchError, match="Member.add: argument 'batch'"):
        elsewhere.call(lambda handle: handle.method(Member.add)(Batch({"x": [1, 2, 3]})))
    with pytest.raises(errors.GroupCallError, match="has no public method 'nothing'"):
        elsewhere.call(lambda handle: handle.execute_all_sync("nothing"))
    with pytest.raises(errors.DispatchError, match="keep needs the cluster's own controller"):
        elsewhere.call(lambda handle: handle.method(Member.make).keep(2))
    with pytest.raises(IndexError, match="rank is 9"):
        elsewhere.call(lambda handle: handle.execute_on([9], "steps"))
    with pytest.raises(ValueError, match="no duplicates"):
        elsewhere.call(lambda handle: handle.execute_on([1, 1], "steps"))
    with pytest.raises(
        errors.ArgumentNotSerializableError, match=r"argument args\[0\] \(a _thread.lock"
    ):
        elsewhere.call(lambda handle: handle.execute_all_sync("echo", threading.Lock()))
    assert elsewhere.call(lambda handle: handle.execute_all_sync("echo", 1)) == [1] * 4


def test_handle_call_limit(elsewhere: Elsewhere, tmp_path: Path) -> None:
    release = str(tmp_path / "release")
    with pytest.raises(errors.HelmsmanError, match=r"did not .* within .*0\.3"):
        elsewhere.call(lambda handle: handle.execute_on([1], "wait_on", [1], release, timeout=0.3))
    Path(release).touch()
    assert elsewhere.call(lambda handle: handle.execute_all_sync("echo", 2)) == [2] * 4


def test_handle_reconnects_after_close(elsewhere: Elsewhere) -> None:
    def twice(handle: Any) -> list[int]:
        with handle:
            before = handle.execute_rank_zero_sync("echo", 1)
        handle.close()
        return [before, handle.execute_rank_zero_sync("echo", 2)]

    assert elsewhere.call(twice) == [1, 2]


def test_handle_of_closed_cluster(resources: ResourceManager) -> None:
    cluster = start(resources, "short-lived")
    process = Elsewhere(cluster)  # pickled as its handle
    assert process.call(type) is ClusterHandle
    assert process.call(lambda handle: handle.execute_all_sync("echo", 1)) == [1] * 4
    cluster.close()
    with pytest.raises(errors.HelmsmanError, match="'short-lived' is closed|cannot be reached"):
        process.call(lambda handle: handle.execute_all_sync("echo", 1))
    with pytest.raises(errors.HelmsmanError, match="is closed"):
        cluster.handle()
    late = Elsewhere(process.call(lambda handle: handle))
    with pytest.raises(
        errors.HelmsmanError,
        match="controller of Cluster 'short-lived' cannot be reached: .* has ended or closed it",
    ):
        late.call(lambda handle: handle.execute_all_sync("echo", 1))
    for each in (process, late):
        each.close()


def test_handle_survives_death_of_caller(resources: ResourceManager) -> None:
    with start(resources, "robust") as cluster:
        process = Elsewhere(cluster.handle())
        assert process.call(lambda handle: handle.execute_rank_zero_sync("echo", 1)) == 1
        os.kill(process.process.pid, signal.SIGKILL)
        process.close()
        other = Elsewhere(cluster.handle())
        assert other.call(lambda handle: handle.execute_rank_zero_sync("echo", 2)) == 2
        other.close()
