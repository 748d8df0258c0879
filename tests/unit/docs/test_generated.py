"""Test that generated pages and the API reference follow the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import helmsman
import helmsman.testing
from docs._site.causes import CAUSES
from docs._site.hooks import MARK, MODULE, public_names, source_of
from docs._site.pages import COMMAND, error_classes, generated
from helmsman.api import errors
from tests.docs.snippets import PAGES, ROOT


@pytest.mark.parametrize(
    ("path", "content"),
    [*generated()],
    ids=lambda each: each.name if isinstance(each, Path) else "",
)
def test_generated_pages_up_to_date(path: Path, content: str) -> None:
    assert path.read_text() == content, f"{path.relative_to(ROOT)} is out of date; run: {COMMAND}"


def test_catalogue_has_cause_and_fix_of_every_error() -> None:
    raised = {
        each.__name__
        for each in error_classes()
        if each.__subclasses__() == [] or each is errors.BootstrapError
    }
    assert raised <= CAUSES.keys()
    assert CAUSES.keys() <= {each.__name__ for each in error_classes()}


def test_reference_has_public_names() -> None:
    assert public_names("helmsman") == set(helmsman.__all__)
    assert set(helmsman.testing.__all__) - {"GENERATED", "Lengths"} <= public_names(
        "helmsman.testing"
    ) | {
        "log_normal_lengths",
        "run_virtually",
    }


def test_reference_pages_name_modules() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    assert {
        "helmsman",
        "helmsman.agents",
        "helmsman.errors",
        "helmsman.testing",
        "helmsman.weights",
        "helmsman.recipes",
        "helmsman.policies",
        "helmsman.worker_groups",
    } == set(MARK.findall(text))
    assert all(source_of(module) for module in MODULE.findall(text))


def test_site_has_all_pages() -> None:
    config = yaml.safe_load(re.sub(r"!!\S+", "", (ROOT / "mkdocs.yml").read_text()))

    def listed(entries: object) -> set[str]:
        if isinstance(entries, str):
            return {entries}
        values = entries.values() if isinstance(entries, dict) else entries
        return set().union(*(listed(each) for each in values))  # type: ignore[attr-defined]

    assert listed(config["nav"]) == {
        str(page.relative_to(ROOT / "docs")) for page in PAGES if page.name != "README.md"
    }
