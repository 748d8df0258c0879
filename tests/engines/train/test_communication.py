"""Test that options of FSDP's communication change a step's collectives and not its result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from helmsman.engines._train.parallel import clip_gradients
from tests.engines.ranks import run_ranks
from tests.engines.train.communication import CASES, NUM_UNITS, all_cases, require_same_losses


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Any]:
    return run_ranks(all_cases, 2, 1)[0]  # type: ignore[no-any-return]


def test_communication_same_losses(two_ranks: dict[str, Any]) -> None:
    require_same_losses(two_ranks)


def test_communication_num_gathers(two_ranks: dict[str, Any]) -> None:
    """Four micro-batches; the rest of the model stays gathered between forward and backward."""
    num_layers = NUM_UNITS - 1
    counts = {name: each["counts"] for name, each in two_ranks.items()}
    assert counts["one micro-batch"]["_allgather_base_"] == num_layers * 2 + 1
    assert counts["default"]["_allgather_base_"] == 4 * (num_layers * 2 + 1)
    assert counts["kept after backward"]["_allgather_base_"] == (num_layers * 5 + 1)
    assert counts["kept"]["_allgather_base_"] == NUM_UNITS
    for each in CASES:
        assert counts[each]["_reduce_scatter_base_"] == 4 * NUM_UNITS


def test_communication_prefetch_order(two_ranks: dict[str, Any]) -> None:
    gather, layers = "gather", ["layer 0", "layer 1", "layer 2"]
    assert two_ranks["default"]["order"] == [
        gather,
        *(each for layer in layers for each in (gather, layer)),
    ]
    assert two_ranks["prefetched"]["order"] == [gather, gather, gather, gather, *layers]


def test_clip_gradients_below_limit() -> None:
    """Gradients below the limit are not written."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([0.0, 3.0, 4.0])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        version = parameter.grad._version
        assert clip_gradients([parameter], 6.0) == 5.0
        assert parameter.grad._version == version
        assert clip_gradients([parameter], 1.0) == 5.0
        assert parameter.grad.norm() == pytest.approx(1.0)
    finally:
        dist.destroy_process_group()
