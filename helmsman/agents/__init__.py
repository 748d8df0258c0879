"""Train existing agents: they use the model through APIs of OpenAI or Anthropic, unchanged.

    from helmsman.agents import AgentGateway

    with AgentGateway(rollout, tokenizer) as gateway, gateway.session() as session:
        session.reward = my_agent(base_url=session.base_url, api_key=session.key)
        samples = session.samples()

docs/agents.md is the guide.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helmsman.agents._session import AgentSession as AgentSession
    from helmsman.agents._session import SessionLimits as SessionLimits
    from helmsman.agents._session import SessionRecord as SessionRecord
    from helmsman.agents.checking import chat_check as chat_check
    from helmsman.agents.environments import play as play
    from helmsman.agents.environments import run_task_folder as run_task_folder
    from helmsman.agents.gateway import AgentGateway as AgentGateway
    from helmsman.agents.programs import ProgramFailedError as ProgramFailedError
    from helmsman.agents.programs import ProgramResult as ProgramResult
    from helmsman.agents.programs import run_program as run_program
    from helmsman.agents.samples import Sample as Sample
    from helmsman.agents.samples import turn_advantages as turn_advantages
    from helmsman.agents.tools import FunctionTools as FunctionTools
    from helmsman.agents.tools import McpTools as McpTools
    from helmsman.agents.tools import ToolLoop as ToolLoop
    from helmsman.agents.tools import Tools as Tools

_HOMES = {
    "FunctionTools": "tools",
    "McpTools": "tools",
    "ProgramFailedError": "programs",
    "ProgramResult": "programs",
    "ToolLoop": "tools",
    "Tools": "tools",
    "play": "environments",
    "run_program": "programs",
    "run_task_folder": "environments",
    "AgentGateway": "gateway",
    "AgentSession": "_session",
    "Sample": "samples",
    "SessionLimits": "_session",
    "SessionRecord": "_session",
    "chat_check": "checking",
    "turn_advantages": "samples",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - the names above


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'helmsman.agents' has no attribute {name!r}")
    return getattr(importlib.import_module(f"helmsman.agents.{home}"), name)


def __dir__() -> list[str]:
    return list(__all__)
