"""Distillation: a larger model as a teacher of the policy's own tokens, or of given answers.

The reverse KL divergence from policy to teacher is an expectation over the policy's tokens. Its
estimate for a token, log teacher - log policy, is an advantage of that token alone: GKD,
arXiv:2306.13649 eq. 4 with the reverse KL; MiniLLM, arXiv:2306.08543 eq. 4 without the later steps.
With the teacher's most probable tokens instead, the divergence over them is a part of the loss,
``helmsman.engines.losses.columns.teacher_kl``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from helmsman.api.engines import PER_CHOICE
from helmsman.api.reward_shaping import plain
from helmsman.recipes.reference import FrozenReference
from helmsman.recipes.tokens import FolderTokenizer, model_limits


class Teacher:
    """Adds a teacher's judgement of each token to samples.

    Args:
        model: The teacher.
        coef: Weight beside the rewards.
        num_choices: Number of the teacher's most probable tokens; 0 for the sampled tokens alone.
        num_ids: Number of token ids that the student also has.
    """

    def __init__(
        self, model: FrozenReference, coef: float, num_choices: int = 0, num_ids: int = 0
    ) -> None:
        self._model, self._coef = model, coef
        self._num_choices, self._num_ids = num_choices, num_ids

    def teach(self, samples: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Add the teacher's choices, or coef * (log teacher - log policy) to the advantages.

        Args:
            samples: Samples, which receive ``top_ids`` and ``top_logprobs`` (T, k) and
                ``top_coef``. Without choices, they have ``logprobs`` of the policy and
                ``advantages``, one or (T,).

        Returns:
            Without choices ``teacher/kl``, the mean of log policy - log teacher of sampled tokens.
        """
        tokens = [{"input_ids": sample["input_ids"]} for sample in samples]
        if self._num_choices:
            found = self._model.top_choices(tokens, self._num_choices, self._num_ids)
            for sample, choices in zip(samples, found, strict=True):
                sample |= {**dict(zip(PER_CHOICE, choices, strict=True)), "top_coef": self._coef}
            return {}
        rows = self._model.logprobs(tokens)
        total, count = 0.0, 0
        for sample, row in zip(samples, rows, strict=True):
            mask = sample["loss_mask"]
            columns = zip(row.tolist(), plain(sample["logprobs"]), mask, strict=True)
            gains = [theirs - ours if kept else 0.0 for theirs, ours, kept in columns]
            before = sample["advantages"]
            if not isinstance(before, list):
                before = [before] * len(mask)
            pairs = zip(before, gains, strict=True)
            sample["advantages"] = [each + self._coef * gain for each, gain in pairs]
            total, count = total - sum(gains), count + sum(map(bool, mask))
        return {"teacher/kl": total / max(1, count)}


def check_teacher(folder: str, student: str, num_choices: int, field: str, longest: int = 0) -> int:
    """Check that a teacher reads the student's tokens, and as many of them.

    Models of a family may have other numbers of embeddings (Qwen2.5: 151,936 and 152,064), and a
    tokenizer more tokens at its end than the other, such as one for padding.

    Args:
        folder: Folder of the teacher.
        student: Folder of the student.
        num_choices: The setting ``<field>_top_k``.
        field: The setting with the teacher's folder.
        longest: Maximum length of a sequence in tokens.

    Returns:
        The number of token ids that both models have.

    Raises:
        ValueError: The tokenizers differ, one is missing, the teacher has no embedding of a
            student's token or too few positions, or there are fewer ids than ``num_choices``.
    """
    own, other = (FolderTokenizer(each).tokenizer.get_vocab() for each in (student, folder))
    rows, (rows_of_teacher, positions) = model_limits(student)[0], model_limits(folder)
    if longest > positions:
        raise ValueError(
            f"{field}, {folder}, has {positions} positions, and a sequence may have {longest} "
            "tokens; expected as many positions. Lower data.max_prompt_tokens and "
            "rollout.max_new_tokens (with agents agent.max_context, in SFT data.max_tokens), or "
            "give another teacher"
        )
    last, last_of_teacher = max(own.values()), max(other.values())
    shared = 1 + min(last, last_of_teacher)
    if apart := [each for each in own.items() ^ other.items() if each[1] < shared]:
        apart.sort(key=lambda each: each[1])
        raise ValueError(
            f"{field}, {folder}, has another tokenizer than the model, {student}: "
            f"{len(apart)} entries differ, such as {apart[0][0]!r}. Its log-probabilities would be "
            "of other tokens; give a teacher of the same family"
        )
    if (last := min(last, rows - 1)) >= rows_of_teacher:
        raise ValueError(
            f"{field}, {folder}, has {rows_of_teacher} embeddings, and the model, {student}, has "
            f"the token {last}, which it may sample; expected an embedding for each token. Give "
            "the teacher more (resize_token_embeddings of transformers)"
        )
    num_ids: int = min(shared, rows, rows_of_teacher)
    if num_choices > num_ids:
        raise ValueError(
            f"{field}_top_k is {num_choices}; expected at most {num_ids}, the tokens that the "
            f"teacher, {folder}, and the model, {student}, have"
        )
    return num_ids
