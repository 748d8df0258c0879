"""The README's first example is what it says it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.slow
def test_readme_example_prints(tmp_path: Path) -> None:
    """As it stands there; that the other schedulers answer the same is part of the contract."""
    script = tmp_path / "example.py"
    script.write_text(re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0])
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=90, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[42, 42]"


PAGES = [README, *sorted((README.parent / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_links_lead_to_headings(page: Path) -> None:
    for target, _, heading in re.findall(r"\]\(([^)#:]*)(#([^)]+))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert heading in {
                re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
            }, f"{target}#{heading}"
