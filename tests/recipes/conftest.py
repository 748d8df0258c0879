"""A model and data for runs of the GRPO recipe, with one thread for each script."""

from __future__ import annotations

from pathlib import Path

import pytest

from helmsman.recipes import make_model
from tests.examples.conftest import one_thread
from tests.recipes.runs import Runs
from tests.unit.recipes.data import write_jsonl

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model and a file of prompts."""
    folder = tmp_path_factory.mktemp("given")
    model = make_model(folder / "model", num_layers=2, width=64)
    return model, write_jsonl(folder / "sums.jsonl")


@pytest.fixture
def runs(given: tuple[Path, Path], tmp_path: Path) -> Runs:
    return Runs(*given, tmp_path)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a smaller model."""
    return make_model(tmp_path_factory.mktemp("given") / "model", num_layers=1, width=32)
