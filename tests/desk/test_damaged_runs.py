"""Commands about a run never crash on its data: damaged logs, recordings and records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given, settings

from tests.desk.damaged_runs import ARGUMENTS, check_command


@settings(max_examples=50)
@given(**ARGUMENTS)
def test_commands_never_crash_on_data(recorded: Path, places: Path, **arguments: Any) -> None:
    check_command(recorded, places, **arguments)
