"""Test the simulation of rollouts, examples/simulate_rollouts.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.simulate_rollouts import POLICIES, main, make_workload, parse, simulate
from helmsman.testing import run_virtually

SMALL = ["--instances", "8", "--capacity", "16", "--prompts", "32", "--samples", "4"]


def test_simulate_rollouts_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "new" / "simulation.png"
    assert main([*SMALL, "--out", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "128 requests" in printed
    for policy in POLICIES:
        assert policy in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_simulate_failures() -> None:
    options = parse([*SMALL, "--failures", "3", "--rebuild-s", "5"])
    workload = make_workload(options)
    found = run_virtually(simulate("x", POLICIES["least outstanding tokens"](), workload, options))
    again = run_virtually(simulate("x", POLICIES["least outstanding tokens"](), workload, options))
    assert found == again, "the same seed gives the same run"
    assert len(found.running) == len(workload.requests), "every request has ended, once"
    assert 0 < found.num_repeated_tokens < sum(workload.lengths.values()) / 2
    assert found.makespan_s >= found.bound_s


def test_simulate_prefix_affinity() -> None:
    options = parse([*SMALL, "--cache-tokens", "4096"])
    workload = make_workload(options)
    cached = {
        name: run_virtually(simulate(name, policy(), workload, options)).cached
        for name, policy in POLICIES.items()
    }
    assert cached["prefix affinity"] > cached["least outstanding tokens"] + 0.1


@pytest.mark.parametrize(
    ("flag", "value", "message"), [("--instances", "0", "1 or more"), ("--failures", "9", "0 to 8")]
)
def test_parse_invalid_flags(
    flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([*SMALL, flag, value])
    assert message in capsys.readouterr().err
