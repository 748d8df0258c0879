"""Test the advantages of a teacher, and the refusal of one with other tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helmsman.recipes import GRPO, SFT, make_model
from helmsman.recipes.reference import FrozenReference
from helmsman.recipes.roles import make_jobs
from helmsman.recipes.teacher import Teacher, check_teacher
from helmsman.recipes.tokens import FolderTokenizer
from tests.recipes.runs import lines


class Fixed(FrozenReference):
    """Gives each token of a sample its own log-probability."""

    def __init__(self) -> None:
        """Have no ranks."""

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
    found = Teacher(Fixed(), coef=2.0).teach(samples)
    assert samples[0]["advantages"] == [2.0, 2.0 + 2 * (-0.5 + 1.0), 2.0 + 2 * (-1.0 + 3.0)]
    assert samples[1]["advantages"] == [0.0, 1.0 + 2 * (-0.5 + 0.25)]
    assert found == {"teacher/kl": pytest.approx((-0.5 - 2.0 + 0.25) / 3)}


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("given") / "student", num_layers=1, width=32)


def test_other_tokenizer_refused(student: Path, tmp_path: Path) -> None:
    teacher = make_model(tmp_path / "teacher", num_layers=1, width=64)
    num_ids = check_teacher(str(teacher), str(student), 0, "algorithm.teacher")
    assert num_ids == len(FolderTokenizer(str(student)).tokenizer)
    text = (teacher / "tokenizer.json").read_text()
    (teacher / "tokenizer.json").write_text(text.replace('"7"', '"seven"'))
    with pytest.raises(ValueError, match=r"has another tokenizer .* 2 entries differ, such as '"):
        check_teacher(str(teacher), str(student), 0, "algorithm.teacher")
    recipe = GRPO(
        str(student), ["1"], rewards=[], algorithm={"teacher": str(teacher)}, out=str(tmp_path)
    )
    with pytest.raises(ValueError, match=r"algorithm\.teacher, .* has another tokenizer"):
        recipe.load()
    sft = SFT(str(student), [{"text": "1"}], teacher=str(teacher), out=str(tmp_path))
    with pytest.raises(ValueError, match=r"^teacher, .* has another tokenizer"):
        sft.load()


def grown(folder: Path, num_rows: int, added: str = "") -> None:
    """Give a model other embeddings and, at the end of its tokenizer, another token."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(num_rows, mean_resizing=False)
    model.save_pretrained(folder)
    if added:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens([added], special_tokens=True)
        tokenizer.save_pretrained(folder)


def test_models_of_a_family_with_other_numbers_of_tokens(tmp_path: Path) -> None:
    """Llama 2 with a padding token, and the sizes of Qwen2.5: huggingface/trl issue 3028."""
    small, large = (
        make_model(tmp_path / name, num_layers=1, width=32) for name in ("small", "large")
    )
    one, other = str(small), str(large)
    num_ids = len(FolderTokenizer(one).tokenizer)
    grown(large, num_ids + 9)
    assert check_teacher(other, one, num_ids, "teacher") == num_ids
    assert check_teacher(one, other, num_ids, "teacher") == num_ids
    grown(large, num_ids + 9, added="<more>")
    assert check_teacher(other, one, 0, "teacher") == num_ids
    with pytest.raises(
        ValueError,
        match=rf"teacher, .*small, has {num_ids} embeddings, and the model, .*large, has the token "
        rf"{num_ids}, .*\(resize_token_embeddings",
    ):
        check_teacher(one, other, 0, "teacher")
    grown(small, num_ids + 1)
    assert check_teacher(one, other, 0, "teacher") == num_ids
    with pytest.raises(
        ValueError, match=f"teacher_top_k is {num_ids + 1}; expected at most {num_ids}, the tokens"
    ):
        check_teacher(one, other, num_ids + 1, "teacher")


def test_teacher_of_a_shorter_context_refused(student: Path, tmp_path: Path) -> None:
    """Qwen2.5-Math has 4,096 positions, and its students more; beyond them, it guesses."""
    teacher = make_model(tmp_path / "teacher", num_layers=1, width=32)
    path = teacher / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 64}))
    recipe = GRPO(
        str(student), ["1"], rewards=[], algorithm={"teacher": str(teacher)}, out=str(tmp_path)
    )
    with pytest.raises(ValueError, match=r"has 64 positions, and a sequence may have 512 tokens;"):
        recipe.load()
    sft: dict[str, Any] = {"teacher": str(teacher), "out": str(tmp_path)}
    with pytest.raises(ValueError, match=r"^teacher, .* has 64 positions, and a .* have 71 tokens"):
        SFT(str(student), [{"text": "1" * 70}], **sft).load()
    SFT(str(student), [{"text": "1"}], **sft).load()


def test_settings_of_the_top_k(student: Path, tmp_path: Path) -> None:
    def recipe(**algorithm: Any) -> GRPO:
        return GRPO(str(student), ["1"], rewards=["exact"], algorithm=algorithm, out=str(tmp_path))

    with pytest.raises(ValueError, match="loss is 'dpo'; expected grpo, ppo, .*_top_k 0, not 8"):
        recipe(teacher=str(student), teacher_top_k=8, loss="dpo")
    with pytest.raises(ValueError, match=r"algorithm\.teacher_top_k is 9999; expected at most"):
        recipe(teacher=str(student), teacher_top_k=9999).load()
    with pytest.raises(ValueError, match="teacher_coef is 2; expected at most 1"):
        SFT(str(student), ["1"], teacher_coef=2, out=str(tmp_path))


def test_answers_with_a_teacher(student: Path, tmp_path: Path) -> None:
    """SFT and GRPO with a teacher come closer to it."""
    teacher = make_model(tmp_path / "teacher", num_layers=1, width=64, seed=7)
    shared: dict[str, Any] = {
        "cluster": {"scheduler": "inline"},
        "train": {"lr": 1e-2},
        "steps": 4,
        "tracking": {"to": ()},
        "checkpoints": {"export": "none"},
    }
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    algorithm = {"teacher": str(teacher), "teacher_top_k": 8}
    sft = SFT(
        str(student),
        rows,
        teacher=str(teacher),
        teacher_top_k=8,
        teacher_coef=1.0,
        batch_size=8,
        out=str(tmp_path / "sft"),
        **shared,
    )
    assert [job.role for job in sft.jobs()] == ["train", "teacher"]
    grpo = GRPO(
        str(student),
        [row["prompt"] for row in rows],
        rewards=[],
        algorithm=algorithm,
        prompts_per_step=16,
        samples_per_prompt=1,
        rollout={"max_new_tokens": 6},
        out=str(tmp_path / "grpo"),
        **shared,
    )
    for recipe in (sft, grpo):
        recipe.train()
        assert "evaluations: none" not in recipe.describe(), "there is nothing held out"
        found = lines(Path(recipe.settings.out) / "metrics.jsonl")
        divergences = [row["teacher/kl"] for row in found if "teacher/kl" in row]
        assert len(divergences) == 4
        assert 0 < divergences[-1] < 0.9 * divergences[0]


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
    for algorithm in (
        {"teacher": str(student), "preset": "ppo"},
        {"teacher": str(student), "teacher_coef": 0},
    ):
        with pytest.raises(
            ValueError, match=r"rewards is empty and algorithm.(preset .ppo.|teacher_coef is 0)"
        ):
            GRPO(str(student), ["1"], rewards=[], algorithm=algorithm, out=str(tmp_path))
    measured = [{"use": "exact", "weight": 0}]
    algorithm = {"teacher": str(student)}
    GRPO(str(student), ["1"], rewards=measured, algorithm=algorithm, samples_per_prompt=1)
    with pytest.raises(ValueError, match="samples_per_prompt is 1; expected 2 or more, since rew"):
        GRPO(str(student), ["1"], rewards="exact", algorithm=algorithm, samples_per_prompt=1)
    recipe = GRPO(str(student), ["1"], rewards=[], algorithm=algorithm, out=str(tmp_path))
    assert [job.role for job in make_jobs(recipe.settings)] == ["train", "rollout", "teacher"]
    held: dict[str, Any] = {"train": ["1"], "held_out": ["2"]}
    recipe = GRPO(str(student), held, rewards=[], algorithm=algorithm, out=str(tmp_path))
    recipe.load()
    assert "evaluations: none without rewards; one of weight 0 measures alone" in recipe.describe()
