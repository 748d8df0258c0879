"""Training of unmodified agents, which use the model through OpenAI's or Anthropic's API.

    from helmsman.agents import AgentGateway

    with AgentGateway(rollout, tokenizer) as gateway, gateway.session() as session:
        session.reward = my_agent(base_url=session.base_url, api_key=session.key)
        samples = session.samples()

docs/agents.md is the guide.
"""

from helmsman.agents._session import AgentSession, SessionLimits, SessionRecord
from helmsman.agents.checking import chat_check
from helmsman.agents.environments import play, run_nemo_gym, run_task_folder, run_verifiers
from helmsman.agents.gateway import AgentGateway
from helmsman.agents.programs import ProgramFailedError, ProgramResult, run_program
from helmsman.agents.samples import Sample, turn_advantages
from helmsman.agents.tools import FunctionTools, McpTools, ToolLoop, Tools

__all__ = [
    "AgentGateway",
    "AgentSession",
    "FunctionTools",
    "McpTools",
    "ProgramFailedError",
    "ProgramResult",
    "Sample",
    "SessionLimits",
    "SessionRecord",
    "ToolLoop",
    "Tools",
    "chat_check",
    "play",
    "run_nemo_gym",
    "run_program",
    "run_task_folder",
    "run_verifiers",
    "turn_advantages",
]
