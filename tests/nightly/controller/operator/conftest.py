"""Fixture: a run with a staged fault."""

from __future__ import annotations

from tests.controller.operator.conftest import stage

__all__ = ["stage"]
