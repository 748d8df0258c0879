"""Test trackers: their output, and the error when a package is missing."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import pytest

from helmsman.api.errors import BackendNotInstalledError
from helmsman.recipes.trackers import Console, MetricsFile, open_trackers, require_trackers
from tests.unit.recipes.data import settings


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_require_trackers_names_install_command(name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed here")
    with pytest.raises(BackendNotInstalledError, match=r"pip install 'helmsman-rl\[tracking\]'"):
        require_trackers(settings(("tracking.to", f'["console", "{name}"]')))


def test_metrics_file_rewinds(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.read() == []
    for step in range(4):
        file.log(step, {"loss": step / 2})
    with open(tmp_path / "metrics.jsonl", "ab") as cut:
        cut.write(b'{"step":4,"lo')
    file.rewind(1)
    file.log(2, {"loss": 7.0})
    assert file.read() == [
        {"step": 0, "loss": 0.0},
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 7.0},
    ]


def test_console_rows(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.log(0, {"eval/greedy_accuracy": 0.25, "eval/sums/greedy_accuracy": 0.125})
    console.log(1, {"loss": -0.5, "reward/mean": 0.25, "time/step": 1.5})
    names, first, second = capsys.readouterr().out.splitlines()
    assert names.split()[:3] == ["step", "loss", "reward"]
    assert first.endswith("greedy_accuracy 25.0%")
    assert second.split()[:3] == ["1", "-0.5000", "0.250"]


def test_open_trackers_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with open_trackers(settings(("out", str(tmp_path))), file) as trackers:
        trackers.log(1, {"loss": 1.0})
        trackers.rewind(0)
        trackers.log(1, {"loss": 2.0})
    assert file.read() == [{"step": 1, "loss": 2.0}]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_console_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    console = Console(4)
    console.log(2, {"loss": 0.25})
    console.show("a table")
    console.close()
    assert "0.2500" in terminal.getvalue()
    assert "a table" in terminal.getvalue()
    assert "2/4" in terminal.getvalue()
