"""Run these tests where vLLM is installed, and declare the mark of those of each commit."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark ``ci``: twenty tests that show most in the least time."""
    config.addinivalue_line("markers", "ci: runs at each commit, by `pytest -m ci tests/vllm`")
