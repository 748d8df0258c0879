"""Creates schedulers by name; their modules are imported on use."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from helmsman.api.errors import UnknownBackendError
from helmsman.api.scheduler import Scheduler
from helmsman.api.suggestions import did_you_mean

_SCHEDULERS = {
    "ray": "helmsman.controller._scheduler.ray.scheduler:RayScheduler",
    "local": "helmsman.controller._scheduler.local:LocalScheduler",
    "inline": "helmsman.controller._scheduler.inline:InlineScheduler",
}


def make_scheduler(name: str, **options: Any) -> Scheduler:
    """Create a scheduler by name.

    Args:
        name: 'ray', 'local' or 'inline'.
        options: Arguments of its class; ``seed``, ``log_dir`` and ``timeouts`` are common to all.

    Returns:
        The scheduler.

    Raises:
        UnknownBackendError: No scheduler has this name.
        BackendNotInstalledError: The scheduler needs a package that is not installed.
        TypeError: The scheduler has no such option.
    """
    if name not in _SCHEDULERS:
        raise UnknownBackendError(backend=name, known=list(_SCHEDULERS))
    module, _, attribute = _SCHEDULERS[name].partition(":")
    kind = getattr(importlib.import_module(module), attribute)
    known = inspect.signature(kind).parameters
    for option in options:
        if option not in known:
            raise TypeError(
                f"scheduler {name!r} has no option {option!r}; {did_you_mean(option, known)}"
            )
    scheduler: Scheduler = kind(**options)
    return scheduler
