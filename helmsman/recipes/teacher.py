"""On-policy distillation: a larger model as a teacher of the policy's own tokens.

The reverse KL divergence from policy to teacher is an expectation over the policy's tokens. Its
estimate for a token, log teacher - log policy, is an advantage of that token alone: GKD,
arXiv:2306.13649 eq. 4 with the reverse KL; MiniLLM, arXiv:2306.08543 eq. 4 without the later steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from helmsman.recipes.reference import Reference
from helmsman.recipes.tokens import FolderTokenizer


class Teacher:
    """Adds a teacher's judgement of each token to its advantage.

    Args:
        model: Computes the teacher's log-probabilities.
        coef: Weight beside the advantages of rewards.
    """

    def __init__(self, model: Reference, coef: float) -> None:
        self._model, self._coef = model, coef

    def add_advantages(self, samples: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Add coef * (log teacher - log policy) to the advantages of sampled tokens.

        Args:
            samples: Samples with ``logprobs`` of the policy and ``advantages``, one or (T,).

        Returns:
            ``teacher/kl``, the mean of log policy - log teacher over these tokens.
        """
        rows = self._model.logprobs([{"input_ids": sample["input_ids"]} for sample in samples])
        total, count = 0.0, 0
        for sample, row in zip(samples, rows, strict=True):
            mask, own = sample["loss_mask"], list(map(float, sample["logprobs"]))
            gains = [
                (theirs - ours) if kept else 0.0
                for theirs, ours, kept in zip(row.tolist(), own, mask, strict=True)
            ]
            before = sample["advantages"]
            if not isinstance(before, list):
                before = [before] * len(mask)
            pairs = zip(before, gains, strict=True)
            sample["advantages"] = [each + self._coef * gain for each, gain in pairs]
            total, count = total - sum(gains), count + sum(map(bool, mask))
        return {"teacher/kl": total / max(1, count)}


def check_teacher(folder: str, student: str) -> None:
    """Check that a teacher reads the student's tokens.

    Args:
        folder: Folder of the teacher.
        student: Folder of the student.

    Raises:
        ValueError: The tokenizers differ, or one is missing.
    """
    own, other = (FolderTokenizer(each).tokenizer.get_vocab() for each in (student, folder))
    if own != other:
        apart = sorted(own.items() ^ other.items(), key=lambda each: each[1])
        raise ValueError(
            f"algorithm.teacher, {folder}, has another tokenizer than the model, {student}: "
            f"{len(apart)} entries differ, such as {apart[0][0]!r}. Its log-probabilities would be "
            "of other tokens; give a teacher of the same family"
        )
