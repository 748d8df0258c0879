"""How the end of a process is described."""

from __future__ import annotations

import pytest

from helmsman.controller._transport.base import describe_exit, split_returncode


@pytest.mark.parametrize(
    ("returncode", "expected"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-11, "was ended by SIGSEGV"),
        (None, "ended without leaving its exit status"),
    ],
)
def test_the_returncode_of_a_subprocess(returncode: int | None, expected: str) -> None:
    assert describe_exit(*split_returncode(returncode)) == expected
