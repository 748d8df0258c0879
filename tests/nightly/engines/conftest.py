"""Fixtures of the engines' tests by day, for those by night."""

from tests.engines.conftest import make, on_the_host, one_thread

__all__ = ["make", "on_the_host", "one_thread"]
