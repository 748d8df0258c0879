"""Tests that Helmsman works without optional packages, and names the command that installs one."""

from __future__ import annotations

from helmsman.api.extras import EXTRA_OF, install_command
from tests.without_packages import CREATE, run_without


def test_helmsman_works_without_extras() -> None:
    used = """
import asyncio
from helmsman import Job, make_scheduler

class Doubler:
    def double(self, number):
        return 2 * number

with make_scheduler("local", preload=()) as scheduler:
    scheduler.create_workers(Job(role="a"))
    asyncio.run(scheduler.create_engine("a/0", Doubler))
    print(scheduler.call_engine("a/0", "double", None, 21))
"""
    assert run_without(sorted(EXTRA_OF), used) == "42\n"


def test_engine_names_install_command() -> None:
    output = run_without(["torch"], CREATE)
    assert (
        "FSDPTrainEngine needs the package 'torch', which is not installed in this environment"
        in output
    )
    assert install_command("torch") in output
