"""The public contract suite on each of our schedulers."""

from helmsman.testing.contract import TestSchedulerContract

__all__ = ["TestSchedulerContract"]
