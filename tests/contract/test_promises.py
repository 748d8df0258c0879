"""The public contract suite on each of our schedulers."""

import pytest

from helmsman.testing.contract import TestSchedulerContract

__all__ = ["TestSchedulerContract"]

pytestmark = pytest.mark.also_apart
