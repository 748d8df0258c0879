"""Commands about a run never crash on its data: many damaged logs, recordings and records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from tests.desk.damaged_runs import ARGUMENTS, check_command


@pytest.mark.timeout(1200)
@settings(max_examples=1000)
@given(**ARGUMENTS)
def test_commands_never_crash_on_data(recorded: Path, places: Path, **arguments: Any) -> None:
    check_command(recorded, places, **arguments)
