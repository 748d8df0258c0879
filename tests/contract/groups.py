"""The worker group that the contract tests use."""

from __future__ import annotations

import numpy as np

from helmsman.api.batch import Batch
from helmsman.controller._worker_groups.cluster import Cluster
from tests.contract.group_workers import Member

ON_CPU = {"HELMSMAN_PLATFORM": "cpu"}
"""Environment of workers whose devices do not exist."""


class Members(Cluster[Member]):
    """A group with the methods of its workers."""

    add = Member.add
    coordinates = Member.coordinates
    echo = Member.echo
    fail_on = Member.fail_on
    make = Member.make
    rows_of = Member.rows_of


def rows(size: int) -> Batch:
    """Make a batch of numbered rows."""
    return Batch({"x": np.arange(size)})
