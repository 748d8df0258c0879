"""Commands about a run never crash on its data: damaged logs, recordings and records."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.controller.operator import damaged_runs
from tests.controller.operator.damaged_runs import COMMANDS, DAMAGES, RECORDS, Damage


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    damaged_runs.record_run(folder)
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with damaged_runs.own_places(tmp_path_factory.mktemp("places")) as found:
        yield found


@settings(max_examples=200)
@given(
    damages=st.lists(DAMAGES, min_size=1, max_size=5),
    command=st.sampled_from(COMMANDS),
    record=RECORDS,
    locked=st.booleans(),
)
def test_commands_never_crash_on_data(
    recorded: Path, places: Path, damages: list[Damage], command: str, record: bytes, locked: bool
) -> None:
    folder = recorded.parent / "damaged"
    shutil.copytree(recorded, folder)
    try:
        for damage in damages:
            with contextlib.suppress(OSError):  # an earlier one has replaced its folder
                damage(folder)
        assert damaged_runs.run_command(folder, places, command, record, locked) in (0, 1, 2)
    finally:
        shutil.rmtree(folder)
