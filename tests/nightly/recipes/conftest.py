"""The fixtures of tests/recipes."""

from tests.recipes.conftest import given, model, one_thread, runs

__all__ = ["given", "model", "one_thread", "runs"]
