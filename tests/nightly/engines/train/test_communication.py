"""Test options of FSDP's communication on four ranks, of which two are replicas."""

from __future__ import annotations

from tests.engines.ranks import run_ranks
from tests.engines.train.communication import CASES, NUM_UNITS, all_cases, require_same_losses


def test_communication_of_replicas() -> None:
    """Replicas sum once per step, besides the sum of the gradient's norm."""
    found = run_ranks(all_cases, 4, 2)[0]
    require_same_losses(found)
    for name in CASES:
        assert found[name]["counts"]["allreduce_"] == NUM_UNITS + 1
    assert found["default"]["counts"]["_reduce_scatter_base_"] == 2 * NUM_UNITS
