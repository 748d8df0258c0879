"""Optional packages: what installs them is written down, and said where one is missing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from helmsman.api.extras import EXTRA_OF, install_command

ROOT = Path(__file__).parent.parent
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
    assert f"pip install 'helmsman[{extra}]'" in (ROOT / "docs/install.md").read_text()


def run_without(packages: list[str], code: str) -> str:
    """Run a driver without these packages; returns its output. None in sys.modules fails an
    import.
    """
    script = f"import sys; sys.modules.update(dict.fromkeys({packages!r}))\n{code}"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=ROOT,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_helmsman_works_without_extras() -> None:
    used = """
import asyncio
from helmsman import Job, make_scheduler

class Doubler:
    def double(self, number):
        return 2 * number

with make_scheduler("local") as scheduler:
    scheduler.create_workers(Job(role="a"))
    asyncio.run(scheduler.create_engine("a/0", Doubler))
    print(scheduler.call_engine("a/0", "double", None, 21))
"""
    assert run_without(sorted(EXTRA_OF), used) == "42\n"


CREATE = """
import asyncio
from helmsman import Job, make_scheduler
with make_scheduler("inline") as scheduler:
    scheduler.create_workers(Job(role="a"))
    try:
        asyncio.run(scheduler.create_engine("a/0", "helmsman.engines.train.FSDPTrainEngine"))
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize("package", ["torch", pytest.param("transformers", marks=pytest.mark.slow)])
def test_engine_names_install_command(package: str) -> None:
    said = run_without([package], CREATE)
    assert (
        f"FSDPTrainEngine needs the package {package!r}, which is not installed in this environment"
        in said
    )
    assert install_command(package) in said


@pytest.mark.slow
def test_grpo_hf_names_install_command() -> None:
    begin = (
        "from helmsman.recipes.command import main; print(main('grpo', ['--config', 'cpu_smoke']))"
    )
    said = run_without(["transformers"], f"sys.stderr = sys.stdout\n{begin}")
    assert "the tokenizer of a model folder needs the package 'transformers'" in said
    assert install_command("transformers") in said
    assert said.endswith("2\n")
