"""Test the advantages of a teacher, and the refusal of one with other tokens."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from helmsman.recipes import GRPO, make_model
from helmsman.recipes.reference import Reference
from helmsman.recipes.roles import make_jobs
from helmsman.recipes.teacher import Teacher, check_teacher


class Fixed(Reference):
    """Gives each token of a sample its own log-probability."""

    def logprobs(self, tokens: Sequence[dict[str, Any]]) -> list[Any]:
        return [-0.5 * torch.arange(len(each["input_ids"])).float() for each in tokens]


def test_gain_of_each_sampled_token() -> None:
    samples: list[dict[str, Any]] = [
        {
            "input_ids": [7, 8, 9],
            "loss_mask": [0, 1, 1],
            "logprobs": [0.0, -1.0, -3.0],
            "advantages": 2.0,
        },
        {
            "input_ids": [7, 8],
            "loss_mask": [0, 1],
            "logprobs": torch.tensor([0.0, -0.25]),
            "advantages": [0.0, 1.0],
        },
    ]
    found = Teacher(Fixed(), coef=2.0).add_advantages(samples)
    assert samples[0]["advantages"] == [2.0, 2.0 + 2 * (-0.5 + 1.0), 2.0 + 2 * (-1.0 + 3.0)]
    assert samples[1]["advantages"] == [0.0, 1.0 + 2 * (-0.5 + 0.25)]
    assert found == {"teacher/kl": pytest.approx((-0.5 - 2.0 + 0.25) / 3)}


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("given") / "student", num_layers=1, width=32)


def test_other_tokenizer_refused(student: Path, tmp_path: Path) -> None:
    teacher = make_model(tmp_path / "teacher", num_layers=1, width=64)
    check_teacher(str(teacher), str(student))
    text = (teacher / "tokenizer.json").read_text()
    (teacher / "tokenizer.json").write_text(text.replace('"7"', '"seven"'))
    with pytest.raises(ValueError, match=r"has another tokenizer .* 2 entries differ, such as '"):
        check_teacher(str(teacher), str(student))
    recipe = GRPO(
        str(student), ["1"], rewards=[], algorithm={"teacher": str(teacher)}, out=str(tmp_path)
    )
    with pytest.raises(ValueError, match="has another tokenizer"):
        recipe.load()
    shutil.rmtree(teacher)


def test_teacher_beside_the_trainer_without_rewards(student: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rewards is empty"):
        GRPO(str(student), ["1"], rewards=[], out=str(tmp_path))
    with pytest.raises(ValueError, match="replaces all prompts whose answers have equal rewards"):
        GRPO(
            str(student),
            ["1"],
            rewards=[],
            algorithm={"teacher": str(student), "preset": "dapo"},
            out=str(tmp_path),
        )
    algorithm = {"teacher": str(student)}
    recipe = GRPO(str(student), ["1"], rewards=[], algorithm=algorithm, out=str(tmp_path))
    assert [job.role for job in make_jobs(recipe.settings)] == ["train", "rollout", "teacher"]
