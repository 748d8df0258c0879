"""Test that the scripts of the folder `examples` learn, run as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helmsman import make_scheduler
from tests.examples.roll_port import rewards
from tests.examples.scripts import output, step_rewards

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("script", ["quickstart_grpo.py", "train_agent.py", "port_rewards.py"])
def test_recipe_script_learns(script: str, tmp_path: Path) -> None:
    if script == "train_agent.py":
        pytest.importorskip("openai")
    output(tmp_path, script)
    summary = json.loads((tmp_path / "runs" / "grpo" / "summary.json").read_text())
    assert summary["reward_last"] > summary["reward_first"] + 0.3


@pytest.mark.parametrize(
    "command",
    [
        ["multi_turn_tool.py"],
        ["port_environments.py", "--env", "skyrl"],
        ["port_environments.py", "--env", "nemo_rl"],
    ],
    ids=" ".join,
)
def test_multi_turn_script_learns(command: list[str], tmp_path: Path) -> None:
    found = step_rewards(output(tmp_path, *command))
    assert len(found) == 10
    assert found[-1] > found[0] + 0.2


def test_rlhf_roles_equal_on_ray_and_inline(tmp_path: Path) -> None:
    """The outputs are equal to the byte, the digest of the weights included: seeds belong to rows,
    and shares are joined in the order of coordinates.
    """
    ray, inline = (
        output(tmp_path, "rlhf_roles.py", "--scheduler", name, "--seed", "1")
        for name in ("ray", "inline")
    )
    assert ray == inline
    found = step_rewards(ray)
    assert len(found) == 15
    assert found[0] < 0.2
    assert found[-1] > 0.9
    assert max(found[:3]) < min(found[6:9]) < min(found[12:])


def test_port_roll_rlvr_equal_on_ray_and_inline() -> None:
    pytest.importorskip("ray", reason="one of the runs is on Ray")
    with (
        make_scheduler("ray", num_gpus=8, num_cpus=4, address="local") as ray,
        make_scheduler("inline", num_gpus=8) as inline,
    ):
        assert rewards(ray, 0) == rewards(inline, 0)
