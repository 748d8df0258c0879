"""Fixtures: a run with a staged fault, and the files of a run that has ended."""

from __future__ import annotations

from tests.desk.conftest import places, recorded, stage

__all__ = ["places", "recorded", "stage"]
