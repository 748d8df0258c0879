"""Test that each engine class of ours is checked against the configuration that it takes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from helmsman.api.errors import InvalidSpecError
from helmsman.controller._scheduler.argument_names import require_engine_arguments
from helmsman.engines.rollout import HFRolloutEngine
from helmsman.engines.server_engine import ServerEngine
from helmsman.engines.train import FSDPTrainEngine
from helmsman.engines.vllm_engine import VLLMEngine


@pytest.mark.parametrize("engine", [FSDPTrainEngine, HFRolloutEngine, ServerEngine, VLLMEngine])
def test_engine_class_takes_fields_of_its_config(engine: type[Any]) -> None:
    signature = inspect.signature(engine, eval_str=True)
    config, _ = signature.parameters["config"].annotation.__args__
    require_engine_arguments("a", engine, dict.fromkeys((*config.__struct_fields__, "config")))
    with pytest.raises(InvalidSpecError, match="'no_such_field'"):
        require_engine_arguments("a", engine, {"no_such_field": 1})
