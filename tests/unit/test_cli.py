"""Tests of the commands plan and env."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helmsman._cli import main

ROOT = Path(__file__).parents[2]
JOBS, CLUSTER = str(ROOT / "examples" / "jobs.yaml"), str(ROOT / "examples" / "cluster.yaml")


@pytest.fixture
def files(tmp_path: Path) -> Any:
    """Write a file and return its path."""

    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_plan_of_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", JOBS, "--cluster", CLUSTER]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["role", "ranks", "node", "devices", "ports"]
    assert sum(line.startswith("train ") for line in lines) == 8, "one line per node"
    assert lines[-1] == "128 devices on 17 of 21 nodes; 4 other nodes keep all of theirs free"
    assert main(["plan", JOBS, "--cluster", CLUSTER, "--json"]) == 0
    roles = json.loads(capsys.readouterr().out)["roles"]
    assert {role["role"] for role in roles} == {"train", "rollout", "server", "reward", "reference"}


def test_plan_that_does_not_fit(files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = files("jobs.toml", '[[jobs]]\nrole = "big"\ntasks = [{gpu = 9}]\n')
    assert main(["plan", jobs, "--cluster", CLUSTER]) == 1
    output = capsys.readouterr().out
    assert "now or later" in output
    assert "short of 1 GPU. Set SchedulingSpec.gpu to 8" in output
    assert main(["plan", jobs, "--cluster", CLUSTER, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["shortfall"]["missing"] == {"GPU": 1.0}


def test_plan_that_does_not_fit_now(files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = files("cluster.yaml", "- {cpu: 8, gpu: 8, free: {gpu: 2}}")
    jobs = files("jobs.yaml", "- {role: r, tasks: [{gpu: 4}]}")
    assert main(["plan", jobs, "--cluster", cluster]) == 1
    output = capsys.readouterr().out
    assert "does not fit now, but would if the cluster were empty" in output
    assert "short of 2 GPU" in output


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["plan", "nowhere.yaml", "--cluster", CLUSTER], ["nowhere.yaml", "No such file"]),
        (["plan", JOBS, "--cluster", JOBS], ["expected a list of nodes"]),
    ],
)
def test_plan_refuses_invalid_input(
    capsys: pytest.CaptureFixture[str], arguments: list[str], facts: list[str]
) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    for fact in facts:
        assert fact in output.err
    assert "Traceback" not in output.err
    assert output.out == ""


def test_plan_of_an_invalid_job(files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", files("jobs.yaml", "- {role: r, replicas: 0}"), "--cluster", CLUSTER]) == 2
    assert "replicas is 0" in capsys.readouterr().err


def test_main_without_a_valid_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["fly"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "usage: helmsman" in capsys.readouterr().err


def test_env(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "31")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    assert main(["env"]) == 0
    output = capsys.readouterr().out
    shown = {line.split()[0]: line for line in output.splitlines() if line.strip()}
    assert "INFO" in shown["NCCL_DEBUG"]
    assert "HF_TOKEN" in shown
    assert "hf_secret" not in output
    assert "CUDA_VISIBLE_DEVICES" not in shown
    assert "more reach no worker" in output
    assert main(["env", "--all"]) == 0
    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "nowhere" in shown["CUDA_VISIBLE_DEVICES"]
    assert "env_vars" in shown["SOMETHING_ELSE"]


def test_cli_import_is_light() -> None:
    script = (
        "import sys, helmsman._cli; sys.exit(any(name in sys.modules for name in "
        "('ray', 'torch', 'yaml')))"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
