"""The public contract suite on each of our schedulers."""

from helmsman.testing import contract
from tests.contract.marks import ray_smoke


@ray_smoke
class TestPromises(contract.TestSchedulerContract):
    """The guarantees of a scheduler, in the order of its documentation."""
