"""Reports about runs that are killed and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from helmsman.recipes import make_model
from tests.field.phases import VARIANTS, KilledRuns, phases
from tests.field.test_recipes import check_draws
from tests.unit.recipes.data import write_jsonl

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("given") / "model", num_layers=1, width=32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_of_a_run_killed_in_each_phase(variant: str, model: Path, tmp_path: Path) -> None:
    """NeMo-RL #3066, prime-rl #3004: trainer and rollout wait for each other after a resume.

    Runs are killed in 20 phases, 4 of each variant.
    """
    runs = KilledRuns(variant, model, write_jsonl(tmp_path / "sums.jsonl"), tmp_path)
    first = list(VARIANTS).index(variant)
    for number, call in enumerate(phases(runs.num_calls(), range(first, 20, 5), 20)):
        runs.check(f"killed-{number}", call)


@pytest.mark.parametrize("recipe", ["grpo", "sft", "dpo"])
def test_draws_of_a_run_that_is_cut_ten_times(recipe: str, model: Path, tmp_path: Path) -> None:
    """prime-rl #3164 and #3332, open-instruct #1523: data is repeated after a resume."""
    check_draws(recipe, str(model), tmp_path, 10)
