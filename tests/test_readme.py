"""The README's first example is what it says it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("scheduler", ["local", "inline", "ray"])
def test_example_prints_what_the_readme_says(scheduler: str, tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    script = tmp_path / "example.py"
    script.write_text(code.replace('make_scheduler("local")', f'make_scheduler("{scheduler}")'))
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=90, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[42, 42]"


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
