"""Fixtures of the tests of single nodes by day."""

from __future__ import annotations

from tests.cluster.conftest import make_nodes

__all__ = ["make_nodes"]
