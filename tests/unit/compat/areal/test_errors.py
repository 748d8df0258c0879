"""Test that AReaL's errors have its constructors and attributes, and survive pickling."""

from __future__ import annotations

import pickle

import pytest

from helmsman.compat import areal


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        (areal.WorkerCreationError("a", "why", "more"), {"worker_key": "a", "details": "more"}),
        (areal.WorkerFailedError("a/0", 3, "text"), {"exit_code": 3, "stderr": "text"}),
        (areal.WorkerNotFoundError("a/0"), {"worker_id": "a/0"}),
        (areal.EngineCreationError("a/0", "why"), {"reason": "why", "status_code": None}),
        (areal.EngineCallError("a/0", "train", "why", attempt=2), {"method": "train"}),
        (areal.WorkerTimeoutError("a", 3.0), {"worker_key": "a", "timeout": 3.0}),
        (areal.EngineImportError("no.Engine", "why"), {"import_path": "no.Engine"}),
        (areal.PortAllocationError("no ports"), {}),
        (areal.RPCConnectionError("a/0", "host", 1, "why"), {}),
    ],
)
def test_error_has_attributes_and_survives_pickling(
    error: areal.SchedulerError, attributes: dict[str, object]
) -> None:
    loaded = pickle.loads(pickle.dumps(error))
    assert str(loaded) == str(error)
    assert {name: getattr(loaded, name) for name in attributes} == attributes
    for value in attributes.values():
        assert value is None or str(value) in str(error)
