"""Tests of descriptions of the end of a process, and of errors in replies."""

from __future__ import annotations

from pathlib import Path

import pytest

from helmsman._wire.codec import encode
from helmsman.api.errors import EngineCallError
from helmsman.controller._scheduler.transport.base import describe_exit, error_in, split_returncode


@pytest.mark.parametrize(
    ("returncode", "expected"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-11, "was ended by SIGSEGV"),
        (None, "ended with an unknown exit status"),
    ],
)
def test_describe_exit(returncode: int | None, expected: str) -> None:
    assert describe_exit(*split_returncode(returncode)) == expected


def test_error_in_a_module_that_exits_on_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cause_script.py").write_text(
        "import argparse; argparse.ArgumentParser().parse_args(['--unknown'])"
    )
    monkeypatch.syspath_prepend(tmp_path)
    answer = EngineCallError(
        worker_id="a/0",
        engine_name="engine",
        method="run",
        remote_type="cause_script.Error",
        remote_message="no",
        remote_traceback="",
        node="",
        log_path="",
        original=b"ccause_script\nError\n.",
    )
    error = error_in(encode(answer))
    assert isinstance(error, EngineCallError)
    assert error.remote_type == "cause_script.Error"
    assert error.__cause__ is None
