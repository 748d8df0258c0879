"""Test the command line of the checks for accelerators, without accelerators."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import CHECKS, main, two_names  # type: ignore[attr-defined]
from benchmarks.gpu.harness import Figure

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


def test_figure_beside_its_bare_one() -> None:
    beside = Figure(96_320.4, "tokens/s", 123_838.0)
    assert str(beside) == "96,320 tokens/s (bare 123,838, ratio 0.778)"
    assert str(Figure(1.294, "s")) == "1.29 s"
    assert str(Figure(2.0, "GiB", 0.0)) == "2 GiB (bare 0, ratio unknown)"


def test_two_names_of_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU-0a1b-$4\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4567,5")
    assert two_names() == "GPU-0a1b-4567,GPU-0a1b-"
    (tmp_path / "nvidia-smi").unlink()
    with pytest.raises(OSError, match="nvidia-smi"):
        two_names()
