"""Failed rewards: the record in the output folder, warnings, and the limit that ends a run."""

from __future__ import annotations

import collections
import logging
import reprlib
from collections.abc import Iterable
from pathlib import Path

from helmsman import HelmsmanError
from helmsman.recipes.files import append_line
from helmsman.recipes.prompts import Row
from helmsman.recipes.scorer import Scored

log = logging.getLogger(__name__)

FILE = "failures.jsonl"
"""File of the output folder with a line for each failed reward of an answer."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = 80

Judged = tuple[Row, Scored]
"""A row, and the rewards of an answer to it."""


class RewardFailedError(HelmsmanError):
    """Rewards of a batch failed whose ``on_failure`` is 'raise', or too many of them."""


def note_failures(out: Path, step: int, judged: Iterable[Judged], batch: str) -> int:
    """Record and warn of the failed rewards of a batch.

    Args:
        out: The output folder.
        step: Number of the step.
        judged: The row and the rewards of every answer of the batch.
        batch: Name of the batch in messages, such as 'the batch of step 3'.

    Returns:
        The number of answers with a failed reward.

    Raises:
        RewardFailedError: A reward with ``on_failure: raise`` failed, or more than a tenth of the
            answers are left out.
    """
    judged = list(judged)
    failed = [(row, failure) for row, scored in judged for failure in scored.failures]
    for row, failure in failed:
        line = {"step": step, "reward": failure.reward, "prompt": row.prompt}
        append_line(out / FILE, {**line, "cause": failure.cause})
    alike = collections.Counter((_SHORT.repr(row.asked), failure) for row, failure in failed)
    for (prompt, failure), number in alike.items():
        what = f"the reward {failure.reward!r} failed ({batch}, prompt {prompt})"
        if failure.policy == "raise":
            raise RewardFailedError(
                f"{what}: {failure.cause}\nexpected a number, as its on_failure is 'raise'. "
                "Correct the reward, or set on_failure to 'drop' or 'value'."
            )
        fate = "left out" if failure.policy == "drop" else "given failure_value"
        cause = failure.cause.partition("\n")[0].rstrip(".")  # a traceback may follow
        log.warning("%s: %s. Answers %s: %d", what, cause, fate, number)
    num_left_out = sum(scored.is_left_out for _, scored in judged)
    if 10 * num_left_out > len(judged):
        first = next(failure for _, failure in failed if failure.policy == "drop")
        raise RewardFailedError(
            f"rewards failed ({batch}): {num_left_out} of {len(judged)} answers have no reward, "
            "expected at most a tenth. Correct the reward, raise its timeout_s, or set its "
            f"on_failure to 'value'; {out / FILE} has all causes. The first, of the reward "
            f"{first.reward!r}: {first.cause}"
        )
    return sum(bool(scored.failures) for _, scored in judged)
