"""Tests that collectives are read from torch's flight recorder and from a fake NCCL RAS service."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from helmsman.api.run_state import CollectiveState, NcclRank
from helmsman.rpc_server._host.collectives import last_collectives, waiting_nccl_ranks

dist = pytest.importorskip("torch.distributed")

STATUS = {
    "nccl_version": "2.28.9",
    "communicators": [
        {
            "hash": "0xa1",
            "size": 2,
            "ranks": [
                {
                    "rank": 0,
                    "host": "10.0.0.1",
                    "pid": 10,
                    "status": {"init_state": 0, "async_error": 0, "abort_flag": False},
                    "collective_counts": {"Broadcast": 1, "AllReduce": 3},
                }
            ],
            "missing_ranks": [
                {
                    "rank": 1,
                    "host": "10.0.0.2",
                    "pid": 20,
                    "status": {"unresponsive": True, "considered_dead": True},
                }
            ],
        }
    ],
    "ras": {"collection_time_sec": 0.0, "timeouts_count": 0},
}
RANKS = [
    NcclRank(communicator="0xa1", rank=0, host="10.0.0.1", pid=10, num_collectives=4),
    NcclRank(communicator="0xa1", rank=1, host="10.0.0.2", pid=20, problem="dead"),
]


def state(age_s: float) -> CollectiveState:
    return CollectiveState(
        group="0", number=4, name="nccl:all_reduce", sizes=[[4]], age_s=age_s, is_done=False
    )


def serve(listener: socket.socket, replies: list[bytes], asked: list[bytes]) -> None:
    peer, _ = listener.accept()
    with peer, peer.makefile("rwb") as stream:
        for reply in replies:
            asked.append(stream.readline())
            stream.write(reply)
            stream.flush()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_last_collectives(alone: None) -> None:
    import torch

    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    before = last_collectives()[-1]
    dist.all_reduce(torch.ones(4))
    found = last_collectives()[-1]
    assert (found.name, found.sizes) == ("gloo:all_reduce", [[4]])
    assert found.number == before.number + 1
    assert found.age_s < 60.0


def test_last_collectives_of_existing_groups() -> None:
    import torch

    for num_calls in (5, 2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for _ in range(num_calls):
            dist.all_reduce(torch.ones(num_calls))
        (found,) = last_collectives()
        assert found.sizes == [[num_calls]]
        dist.destroy_process_group()
        assert last_collectives() == []


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([b"SERVER PROTOCOL 2\n", b"OK\n", b"OK\n", json.dumps(STATUS).encode()], RANKS),
        ([b"SERVER PROTOCOL 2\n", b"OK\n", b"ERROR: Unknown command\n"], []),
        ([b"SERVER PROTOCOL 2\n", b"OK\n", b"OK\n", b"{}"], []),
        ([b"HTTP/1.1 400 Bad Request\n"], []),
        ([], []),
    ],
    ids=["answers", "before 2.28.7", "another form", "another service", "closes"],
)
def test_nccl_ras(
    alone: None, monkeypatch: pytest.MonkeyPatch, replies: list[bytes], expected: list[NcclRank]
) -> None:
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{listener.getsockname()[1]}")
        assert waiting_nccl_ranks([state(1.0)]) == []
        thread = threading.Thread(target=serve, args=(listener, replies, asked))
        thread.start()
        assert waiting_nccl_ranks([state(9.0)]) == expected
        thread.join()
    commands = [b"CLIENT PROTOCOL 2\n", b"TIMEOUT 1\n", b"SET FORMAT json\n", b"VERBOSE STATUS\n"]
    assert asked == commands[: len(replies)]
