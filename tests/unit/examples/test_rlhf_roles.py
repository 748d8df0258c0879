"""Test examples/rlhf_roles.py on the inline scheduler."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from examples.rlhf_roles import main
from tests.examples.scripts import step_rewards
from tests.recipes.processes import run_here


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the script in this process; returns its output."""

    def run(*flags: str) -> str:
        assert run_here(main, ["--scheduler", "inline", *flags]) == 0
        return capsys.readouterr().out

    return run


def test_rlhf_roles_placement_and_shares(output: Callable[..., str]) -> None:
    text = output("--steps", "2")
    assert len(step_rewards(text)) == 2
    assert "device 0 of node 0: actor_train/0, actor_infer/0, critic/0\n" in text
    assert "device 7 of node 0: reference/3\n" in text
    assert "  rank 3  dp=1/2 tp=1/2 pp=0/1 cp=0/1  devices 3\n" in text
    assert "  rank 2  dp=0/2 tp=0/1 pp=1/2 cp=0/1  devices 6\n" in text
    received = dict(re.findall(r"^  (\w+\.\w+) +([\d -]+)$", text, re.MULTILINE))
    assert {method: counts.split() for method, counts in received.items()} == {
        "actor_train.log_probs": ["32", "32", "31", "31"],
        "actor_train.gradient": ["32", "32", "31", "31"],
        "actor_train.statistics": ["32", "-", "31", "-"],
        "actor_infer.generate": ["32", "32"],
        "reference.embed": ["32", "31", "-", "-"],
        "reference.log_probs": ["32", "31", "32", "31"],
        "critic.values": ["63"],
        "critic.fit": ["63"],
        "reward.score": ["63"],
    }


def test_rlhf_roles_no_steps(output: Callable[..., str]) -> None:
    text = output("--steps", "0")
    assert step_rewards(text) == []
    assert float(re.findall(r"right: ([\d.]+)%", text)[0]) < 50


def test_rlhf_roles_invalid_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--steps", "-1"])
    assert "--steps is -1; expected 0 or more" in capsys.readouterr().err
