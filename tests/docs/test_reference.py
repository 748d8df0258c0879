"""Test that the API reference shows blocking forms as methods; `make docs` runs this, too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.docs.snippets import ROOT

griffe = pytest.importorskip("griffe", reason="needs the extra `docs`")


@pytest.fixture(scope="module")
def package() -> Any:
    extensions = griffe.load_extensions(ROOT / "docs/_site/griffe_blocking.py")
    return griffe.load("helmsman", search_paths=[ROOT], extensions=extensions)


@pytest.mark.parametrize("name", ["RolloutController", "TrainController"])
def test_reference_blocking_forms(package: Any, name: str) -> None:
    """Every public ``x = blocking(async form)`` has the parameters and the text of that form."""
    members = package[name].final_target.members.values()
    assert not [each for each in members if str(getattr(each, "value", "")).startswith("blocking(")]
    made: list[Any] = [each for each in members if each.is_function and "blocking" in each.labels]
    assert made
    assert all(each.docstring and next(iter(each.parameters)).name == "self" for each in made)
