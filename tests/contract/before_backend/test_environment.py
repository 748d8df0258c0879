"""Secrets in the variables of a worker are masked when they are shown."""

from __future__ import annotations

import pytest

from helmsman.api.environment import MASK, MASK_VARIABLE
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from tests.contract.engines import Counter
from tests.contract.helpers import Engine


def test_environment_masks_secrets(
    scheduler: Scheduler, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MASK_VARIABLE, "contract_lic*, OTHER")
    names = [f"CONTRACT_{name}" for name in ("TOKEN", "API_KEY", "CREDS", "LICENCE")]
    pem = "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----\n"
    shown = {
        "CONTRACT_URL": ("http://me:hunter2@host/", f"http://{MASK}@host/"),
        "CONTRACT_PEM": (pem, f"{MASK}\n"),
        **dict.fromkeys(names, ("hunter2", MASK)),
    }
    secrets = {name: value for name, (value, _) in shown.items()}
    (worker,) = scheduler.create_workers(Job(role=role, tasks=[SchedulingSpec(env_vars=secrets)]))
    found = {each.name: each.value for each in scheduler.environment(role)[worker]}
    assert {name: found[name] for name in secrets} == {
        name: masked for name, (_, masked) in shown.items()
    }
    assert "hunter2" not in str(found)
    engine = Engine.create(scheduler, worker, Counter)
    assert engine.call("environ", *secrets) == secrets, "the worker itself has the secrets"
