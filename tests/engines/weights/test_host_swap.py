"""Test that offloaded tensors release their memory and are restored, and that sleep does not change
training.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from helmsman.api.weights import MemoryTarget, WeightFormat, WeightsInMemory
from helmsman.engines._models.distributed import join_process_group, leave_process_group
from helmsman.engines._weights.host_swap import HostBlocks, HostSwap, storage_of
from helmsman.engines.train import FSDPTrainEngine
from tests.engines.conftest import Make
from tests.engines.ranks import run_ranks
from tests.engines.small_models import QWEN2, random_tokens

SAMPLES = [{"input_ids": random_tokens(length, seed=length)} for length in (5, 9, 12, 20, 7, 3)]


def memory_of(tensors: Any) -> int:
    return sum({storage_of(each)._cdata: storage_of(each).nbytes() for each in tensors}.values())


def test_host_swap_offload_and_restore() -> None:
    layer = nn.Linear(4, 4)
    view = layer.weight.detach()[1:, :2]
    expected = layer.weight.detach().clone()
    swap = HostSwap()
    swap.offload([*layer.parameters(), view])
    swap.offload(layer.parameters())
    assert memory_of(layer.parameters()) == 0
    with swap.present(layer.weight):
        assert torch.equal(layer.weight, expected)
        assert memory_of([layer.bias]) == 0
    assert memory_of(layer.parameters()) == 0
    swap.restore()
    assert torch.equal(layer.weight, expected)
    assert torch.equal(view, expected[1:, :2])
    swap.restore()
    assert torch.equal(layer.weight, expected)


def test_host_blocks_exact_and_used_again() -> None:
    """Pinned blocks are reused, since torch rounds their allocations up and keeps them."""
    blocks = HostBlocks()
    num_bytes = (600 << 20) + 12345
    for _ in range(3):
        blocks.reserve(num_bytes, pinned=False)
        taken = [blocks.take(size) for size in (100 << 20, 0, num_bytes - (100 << 20))]
        assert [sum(map(len, pieces)) for pieces in taken] == [
            100 << 20,
            0,
            num_bytes - (100 << 20),
        ]
        addresses = [piece.data_ptr() for pieces in taken for piece in pieces]
        assert len(set(addresses)) == len(addresses)
        blocks.release()
    sizes = [len(block) for block in blocks.blocks]
    assert all(size.bit_count() == 1 for size in sizes)
    assert num_bytes <= sum(sizes) < num_bytes + (8 << 20)


def test_host_swap_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostBlocks, "_LARGEST", 64)
    monkeypatch.setattr(HostBlocks, "_SMALLEST", 8)
    tensors = [torch.arange(size, dtype=torch.float32) for size in (5, 40, 1, 100)]
    swap = HostSwap()
    for _ in range(2):
        swap.offload(tensors[:2])
        swap.offload(tensors)
        assert memory_of(tensors) == 0
        swap.restore()
        for tensor in tensors:
            assert torch.equal(tensor, torch.arange(len(tensor), dtype=torch.float32))


def test_host_swap_drop() -> None:
    layer = nn.Linear(4, 4)
    swap = HostSwap()
    swap.offload([layer.weight])
    swap.drop(layer.parameters())
    assert memory_of(layer.parameters()) == 0
    swap.restore()
    assert memory_of(layer.parameters()) == 80


def test_host_swap_restore_without_room() -> None:
    small, large = torch.arange(4.0), torch.zeros(1)
    swap = HostSwap()
    swap.offload([small, large])
    # The size exceeds the address space, so the allocator fails as on a full device.
    swap._swapped[storage_of(large)._cdata].num_bytes = 1 << 60
    with pytest.raises(RuntimeError, match="memory"):
        swap.restore()
    assert memory_of([small, large]) == 0
    swap._swapped[storage_of(large)._cdata].num_bytes = 4
    swap.restore()
    assert small.tolist() == [0, 1, 2, 3]


# --- the train engine -----------------------------------------------------------------------------


@pytest.fixture
def engine(make: Make) -> FSDPTrainEngine:
    return make()


def tensors_of(engine: FSDPTrainEngine) -> list[torch.Tensor]:
    assert engine._model is not None
    assert engine._optimizer is not None
    states = [value for state in engine._optimizer.state.values() for value in state.values()]
    return [*engine._model.parameters(), *engine._model.buffers(), *states]


def test_sleep_frees_memory_and_refuses_calls(engine: FSDPTrainEngine, tmp_path: Any) -> None:
    engine.train_batch(SAMPLES, "sft")
    engine.eval_batch(SAMPLES, "sft")
    engine.sleep()
    engine.sleep()
    assert memory_of(tensors_of(engine)) == 0
    refused = (
        lambda: engine.train_batch(SAMPLES, "sft"),
        lambda: engine.eval_batch(SAMPLES, "sft"),
        lambda: engine.forward(SAMPLES),
        lambda: engine.save(str(tmp_path / "checkpoint")),
        lambda: engine.load(str(tmp_path / "checkpoint")),
    )
    for call in refused:
        with pytest.raises(RuntimeError, match=r"asleep.*call wake\(\) first"):
            call()
    assert engine.get_version() == 1
    assert not list(tmp_path.iterdir())


def test_destroy_while_asleep(engine: FSDPTrainEngine) -> None:
    engine.sleep()
    engine.destroy()
    engine.destroy()
    with pytest.raises(RuntimeError, match="has no model"):
        engine.wake()


def test_publish_weights_unchanged_by_training(engine: FSDPTrainEngine) -> None:
    """A rollout keeps published weights for rebuilt instances."""
    expected = engine.export_weights()
    published = engine.publish_weights(MemoryTarget(version=0), WeightFormat())
    assert isinstance(published, WeightsInMemory)
    assert expected is not None
    engine.train_batch(SAMPLES, "sft")
    engine.sleep()
    assert all(torch.equal(published.tensors[name], expected[name]) for name in expected)


def train_and_sleep(offload: str, *, sleeps: bool) -> list[dict[str, float]]:
    engine = FSDPTrainEngine(model=QWEN2, lr=1e-2, offload=offload)
    engine.initialize()
    share = SAMPLES[engine.data_parallel_rank :: 2]
    steps = []
    for _ in range(3):
        steps.append(engine.train_batch(share, "sft"))
        engine.forward(share)
        if sleeps:
            awake, target = engine.export_weights(), MemoryTarget(version=engine.get_version())
            engine.sleep()
            asleep = engine.export_weights()
            published = engine.publish_weights(target, WeightFormat())
            if awake is not None:
                assert asleep is not None
                assert isinstance(published, WeightsInMemory)
                assert awake.keys() == asleep.keys() == published.tensors.keys()
                assert all(torch.equal(awake[name], asleep[name]) for name in awake)
                assert all(torch.equal(awake[name], published.tensors[name]) for name in awake)
            assert memory_of(tensors_of(engine)) == 0
            engine.wake()
            engine.wake()
    engine.destroy()
    return steps


def train_in_all_ways() -> dict[str, list[dict[str, float]]]:
    # The engines of all runs share one process group.
    join_process_group(rendezvous_timeout_s=60, collective_timeout_s=60)
    found = {"plain": train_and_sleep("none", sleeps=False)}
    for offload in ("none", "all"):
        found[offload] = train_and_sleep(offload, sleeps=True)
    leave_process_group()
    return found


def test_train_batch_between_sleeps() -> None:
    for found in run_ranks(train_in_all_ways, 2):
        assert found["none"] == found["all"] == found["plain"]


def test_train_batch_offloads_optimizer(engine: FSDPTrainEngine, make: Make) -> None:
    plain = [engine.train_batch(SAMPLES, "sft") for _ in range(3)]
    offloading = make(offload="optimizer")
    for expected in plain:
        assert offloading.train_batch(SAMPLES, "sft") == expected
        assert offloading._optimizer is not None
        states = [
            value for state in offloading._optimizer.state.values() for value in state.values()
        ]
        assert states
        assert memory_of(states) == 0
