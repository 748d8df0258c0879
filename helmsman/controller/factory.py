"""Schedulers by name, loaded when asked for."""

from __future__ import annotations

import importlib
from typing import Any

from helmsman.api.errors import UnknownBackendError
from helmsman.api.scheduler import Scheduler

_SCHEDULERS = {
    "ray": "helmsman.controller.ray_scheduler:RayScheduler",
    "local": "helmsman.controller.local:LocalScheduler",
    "inline": "helmsman.controller.inline:InlineScheduler",
}


def make_scheduler(name: str, **options: Any) -> Scheduler:
    """The scheduler called ``name``: 'ray', 'local' or 'inline'.

    Args:
        options: arguments of its class; ``seed``, ``log_dir`` and ``timeouts`` mean the same for all.
    Raises: UnknownBackendError, BackendNotInstalledError.
    """
    if name not in _SCHEDULERS:
        raise UnknownBackendError(backend=name, known=list(_SCHEDULERS))
    module, _, attribute = _SCHEDULERS[name].partition(":")
    scheduler: Scheduler = getattr(importlib.import_module(module), attribute)(**options)
    return scheduler
