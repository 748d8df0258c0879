"""The API reference shows blocking forms as methods; `make docs` runs this beside the build."""

from __future__ import annotations

from typing import Any

import pytest

from tests.docs.snippets import ROOT

griffe = pytest.importorskip("griffe", reason="needs the extra `docs`")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RolloutController", "TrainController"])
def test_reference_has_signature_of_blocking_forms(name: str) -> None:
    """Every public ``x = blocking(async form)`` has the parameters and the text of that form."""
    extensions = griffe.load_extensions(ROOT / "docs/_site/griffe_blocking.py")
    package = griffe.load("helmsman", search_paths=[ROOT], extensions=extensions)
    members = package[name].final_target.members.values()
    assert not [each for each in members if str(getattr(each, "value", "")).startswith("blocking(")]
    made: list[Any] = [each for each in members if each.is_function and "blocking" in each.labels]
    assert made
    assert all(each.docstring and next(iter(each.parameters)).name == "self" for each in made)
