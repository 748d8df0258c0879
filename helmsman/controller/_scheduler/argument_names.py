"""Checks keyword arguments of our engines against their configurations, which import no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from helmsman.api.errors import InvalidSpecError
from helmsman.api.suggestions import did_you_mean

_CONFIGS = {
    "helmsman.engines.train.FSDPTrainEngine": ("train_config", "TrainConfig"),
    "helmsman.engines.rollout.HFRolloutEngine": ("rollout_config", "RolloutConfig"),
    "helmsman.engines.vllm_engine.VLLMEngine": ("vllm_config", "VLLMConfig"),
    "helmsman.engines.server_engine.ServerEngine": ("_server.protocol", "ServerConfig"),
}
"""Engine -> module and name of the struct whose fields its constructor takes."""


def require_engine_arguments(
    role: str, engine: str | type[Any], arguments: Mapping[str, Any]
) -> None:
    """Check the keyword arguments of an engine's constructor; those of other classes pass.

    Raises:
        InvalidSpecError: The engine is one of ours, and has no such argument.
    """
    path = engine if isinstance(engine, str) else f"{engine.__module__}.{engine.__qualname__}"
    if not arguments or (config := _CONFIGS.get(path.replace(":", "."))) is None:
        return
    module, struct = config
    fields = getattr(importlib.import_module(f"helmsman.engines.{module}"), struct)
    known = [*fields.__struct_fields__, "config"]
    for name, value in arguments.items():
        if name not in known:
            raise InvalidSpecError(
                role=role,
                field=f"the engine's argument {name!r}",
                value=value,
                expected=f"an argument of {path.rpartition('.')[2]}: {did_you_mean(name, known)}",
            )
