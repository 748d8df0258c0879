"""The example of worker groups as its user runs it: the same output on every scheduler, and it
learns.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "rlhf_roles.py"


def output(folder: Path, *flags: str) -> str:
    """What it prints, run from a folder that is not the checkout."""
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *flags],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def rewards(text: str) -> list[float]:
    return [
        float(found) for found in re.findall(r"^step +\d+  reward ([\d.]+)", text, re.MULTILINE)
    ]


def test_rlhf_roles_shows_placement_and_shares(tmp_path: Path) -> None:
    text = output(tmp_path, "--scheduler", "inline", "--steps", "2")
    assert len(rewards(text)) == 2
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


def test_rlhf_roles_without_steps(tmp_path: Path) -> None:
    text = output(tmp_path, "--scheduler", "inline", "--steps", "0")
    assert rewards(text) == []
    assert float(re.findall(r"right: ([\d.]+)%", text)[0]) < 50


def test_rlhf_roles_invalid_flags() -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", "-1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 2
    assert "--steps is -1; expected 0 or more" in ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rlhf_roles_same_output_on_schedulers(tmp_path: Path) -> None:
    """To the byte, also the digest of the weights: seeds belong to rows, and shares are joined in
    the order of coordinates.
    """
    ray, inline = (
        output(tmp_path, "--scheduler", name, "--seed", "1") for name in ("ray", "inline")
    )
    assert ray == inline
    found = rewards(ray)
    assert len(found) == 15
    assert found[0] < 0.2
    assert found[-1] > 0.9
    assert max(found[:3]) < min(found[6:9]) < min(found[12:])
