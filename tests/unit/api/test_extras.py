"""Tests that optional packages are those of pyproject.toml, and their commands documented."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from helmsman.api.extras import EXTRA_OF

ROOT = Path(__file__).parents[3]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
FOR_USERS = sorted(EXTRAS.keys() - {"dev", "bench", "docs"})


def _import_name(requirement: str) -> str:
    name = re.split(r"[<>=\[;! ]", requirement, maxsplit=1)[0]
    return name.lower().replace("-", "_")


def test_extra_of_matches_pyproject() -> None:
    declared = {
        (_import_name(each), extra)
        for extra, requirements in EXTRAS.items()
        if extra not in ("dev", "bench", "docs", "all")
        for each in requirements
        if not each.startswith("helmsman")
    }
    assert declared == set(EXTRA_OF.items())


@pytest.mark.parametrize("extra", FOR_USERS)
def test_install_page_has_install_command(extra: str) -> None:
    assert f"pip install 'helmsman-rl[{extra}]'" in (ROOT / "docs/install.md").read_text()
