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
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FOR_USERS = sorted(EXTRAS.keys() - {"dev"})


def _import_name(requirement: str) -> str:
    name = re.split(r"[<>=\[;! ]", requirement, maxsplit=1)[0]
    return name.lower().replace("-", "_")


def test_the_table_says_what_pyproject_says() -> None:
    declared = {
        (_import_name(each), extra)
        for extra, requirements in EXTRAS.items()
        if extra not in ("dev", "all")
        for each in requirements
        if not each.startswith("helmsman")
    }
    assert declared == set(EXTRA_OF.items())


@pytest.mark.parametrize("extra", FOR_USERS)
def test_the_readme_has_the_command_of_each(extra: str) -> None:
    assert f"pip install 'helmsman[{extra}]'" in (ROOT / "README.md").read_text()


WITHOUT = """
import sys
for name in {packages!r}:
    sys.modules[name] = None
"""


def run_without(packages: list[str], code: str) -> str:
    """What a driver prints in whose environment these packages are missing. A test for ImportError cannot tell None in
    sys.modules from a package that is not there."""
    script = WITHOUT.format(packages=packages) + code
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_helmsman_works_without_any_of_them() -> None:
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
        asyncio.run(scheduler.create_engine("a/0", "{engine}", None, **{arguments}))
    except Exception as error:
        print(type(error).__name__, error)
"""
TRAIN, ROLLOUT = "helmsman.engines.train.FSDPTrainEngine", "helmsman.engines.rollout.HFRolloutEngine"


def test_an_example_says_so_too() -> None:
    begin = "from examples.grpo_hf import main; print(main(['--config', 'examples/hf/cpu_smoke.yaml']))"
    said = run_without(["transformers"], f"sys.stderr = sys.stdout\n{begin}")
    assert "the tokenizer of a model folder needs the package 'transformers'" in said
    assert install_command("transformers") in said
    assert said.endswith("2\n")


@pytest.mark.parametrize(("engine", "package"), [(TRAIN, "torch"), (TRAIN, "transformers"), (ROLLOUT, "safetensors")])
def test_an_engine_says_what_installs_the_package_that_it_lacks(engine: str, package: str) -> None:
    said = run_without([package], CREATE.format(engine=engine, arguments={}))
    assert f"{engine} needs the package {package!r}, which is not installed in this environment" in said
    assert install_command(package) in said
