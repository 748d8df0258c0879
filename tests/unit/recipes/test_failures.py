"""Test the record of failed rewards, and the limit that ends a run."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from helmsman.recipes.failures import FILE, RewardFailedError, note_failures
from helmsman.recipes.prompts import Row
from helmsman.recipes.scorer import Failure, Scored

CHAT = [{"role": "user", "content": "1+1="}]
GOOD = Scored({"judge": 1.0}, 1.0)


def judged(number: int, scored: Scored = GOOD, asked: Any = CHAT) -> list[tuple[Row, Scored]]:
    return [(Row([1], "<user>1+1=", "2", "sums", {}, asked), scored)] * number


def failed(policy: Any = "drop", cause: str = "KeyError: 'a'.\n  in judge") -> Scored:
    return Scored({}, math.nan, (Failure("judge", cause, policy),))


def test_note_failures_up_to_a_tenth(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert note_failures(tmp_path, 3, judged(18) + judged(2, failed()), "the batch") == 2
    (message,) = caplog.messages
    assert message == (
        "the reward 'judge' failed (the batch, prompt [{'content': '1+1=', 'role': 'user'}]): "
        "KeyError: 'a'. Answers left out: 2"
    )
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    cause = "KeyError: 'a'.\n  in judge"
    assert lines == [{"step": 3, "reward": "judge", "prompt": "<user>1+1=", "cause": cause}] * 2


def test_note_failures_beyond_a_tenth(tmp_path: Path) -> None:
    others = judged(1, failed("value", "returned 'x'"))
    message = (
        r"rewards failed \(the batch\): 3 of 20 answers have no reward, .*The first, of the reward "
        "'judge': KeyError: 'a'"
    )
    with pytest.raises(RewardFailedError, match=message):
        note_failures(tmp_path, 3, others + judged(16) + judged(3, failed()), "the batch")


def test_note_failures_of_values_without_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert note_failures(tmp_path, 3, judged(5, failed("value")), "the batch") == 5
    assert caplog.messages[0].endswith("KeyError: 'a'. Answers given failure_value: 5")


def test_note_failures_raise(tmp_path: Path) -> None:
    message = r"the reward 'judge' failed \(the batch, prompt 'a{37}\.\.\.a{38}'\): KeyError: 'a'"
    with pytest.raises(RewardFailedError, match=message):
        note_failures(
            tmp_path, 3, judged(99) + judged(1, failed("raise"), asked="a" * 200), "the batch"
        )


def test_note_failures_none(tmp_path: Path) -> None:
    assert note_failures(tmp_path, 3, judged(4), "the batch") == 0
    assert not (tmp_path / FILE).exists()
