"""One thread for each script that the tests start."""

from tests.examples.conftest import one_thread

__all__ = ["one_thread"]
