"""Test that links of README and documentation lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs._site.hooks import on_page_markdown
from tests.docs.snippets import PAGES, ROOT

PROJECT = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"))]


def anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PROJECT, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_headings(page: Path) -> None:
    for target, _, heading in re.findall(r"\]\(([^)#:\s]*)(#([^)]+))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", on_page_markdown(path.read_text()), re.MULTILINE)
            assert heading in {anchor(title) for title in titles}, f"{target}#{heading}"


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_link_only_to_pages(page: Path) -> None:
    """The site contains only the pages of docs."""
    assert not re.findall(
        r"\]\((?:\.\./)*(?:helmsman|examples|tests|benchmarks)/[^)]*\)", page.read_text()
    )


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
