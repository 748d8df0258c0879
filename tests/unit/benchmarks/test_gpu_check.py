"""Test the command line of the checks for accelerators, without accelerators."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import CHECKS, main  # type: ignore[attr-defined]

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"


def test_gpu_check_without_accelerators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if main(["devices.binding", "--out", str(tmp_path / "gpu.md")]) == 0:
        pytest.skip("this machine has accelerators")
    message = capsys.readouterr().err
    assert "this machine has no accelerator that Helmsman sees" in message
    assert "--rehearse" in message


def test_gpu_check_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    message = capsys.readouterr().err
    assert "there is no check nonsense; there are " in message
    assert all(name in message for name in CHECKS)


def test_gpu_check_names_documented() -> None:
    documented = PAGE.read_text()
    assert [name for name in CHECKS if f"| `{name}` |" not in documented] == []
