"""Connectors to environments: OpenEnv and others with reset and step, and folders with tasks."""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from helmsman.agents._session import AgentSession
from helmsman.agents.programs import ProgramFailedError, run_program


async def play(
    environment: Any,
    session: AgentSession,
    *,
    action: Callable[[Mapping[str, Any]], Any],
    observation: Callable[[Any], str | Sequence[Mapping[str, Any]]] = str,
    tools: Sequence[Mapping[str, Any]] = (),
    max_turns: int = 32,
) -> float:
    """Play an episode of an environment, in which each turn of the model is an action.

    The environment has ``reset()`` and ``step(action)``, both sync or async. A step returns an
    object with ``observation``, ``reward`` and ``done``, as OpenEnv's clients do, or Gymnasium's
    tuple. The reward of each step becomes the reward of its turn.

    Args:
        environment: The environment.
        session: The session in which the model is used.
        action: Makes an action of the model's message, in the form of Chat Completions.
        observation: Makes a text or messages of an observation.
        tools: Functions that the model may call, in the form of Chat Completions.
        max_turns: Most turns of the model.

    Returns:
        The sum of the rewards.

    Raises:
        BadRequestError: A limit of the session is reached.
        HelmsmanError: The model is not available.
        Exception: The environment's own errors.
    """
    seen, _, is_done = _unpacked(await _awaited(environment.reset()))
    messages: list[Mapping[str, Any]] = []
    total = 0.0
    for turn in range(max_turns):
        if is_done:
            break
        shown = observation(seen)
        messages += [{"role": "user", "content": shown}] if isinstance(shown, str) else list(shown)
        message = await session.complete(messages, tools=tools)
        messages.append(message)
        seen, reward, is_done = _unpacked(await _awaited(environment.step(action(message))))
        session.set_turn_reward(turn, reward)
        total += reward
    return total


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _unpacked(result: Any) -> tuple[Any, float, bool]:
    """Return observation, reward and end of the result of ``reset`` or ``step``."""
    if isinstance(result, tuple):
        if len(result) == 2:  # Gymnasium's reset
            return result[0], 0.0, False
        seen, reward, *ends, _ = result
        return seen, float(reward or 0.0), any(ends)
    if hasattr(result, "observation"):
        return result.observation, float(result.reward or 0.0), bool(result.done)
    return result, 0.0, False


async def run_task_folder(
    folder: str | Path,
    command: str | Sequence[str],
    session: AgentSession,
    *,
    timeout: float = 600.0,
    verifier_timeout: float = 300.0,
) -> float:
    """Run an agent's program on a task in Harbor's layout, without a container.

    The folder has ``instruction.md`` and ``tests/test.sh``, and the files of the task in
    ``environment/``. The program runs in a copy of these files; then the tests run there. They
    write the reward to ``$HELMSMAN_LOGS/reward.txt``; without the file, it is 1 if they exit with
    0, else 0. Programs run with the rights of this user: use containers for untrusted ones.

    Args:
        folder: The folder of the task.
        command: The agent's program; it finds the instruction in HELMSMAN_TASK.
        session: The session in which the model is used.
        timeout: Limit of the program in seconds.
        verifier_timeout: Limit of the tests in seconds.

    Returns:
        The reward.

    Raises:
        FileNotFoundError: The folder has no instruction or tests.
        TimeoutError: The program or the tests did not end in time.
        ProgramFailedError: The program exited with an error.
        ValueError: reward.txt is no number.
    """
    folder = Path(folder)
    instruction = (folder / "instruction.md").read_text()
    tests = folder / "tests" / "test.sh"
    if not tests.is_file():
        raise FileNotFoundError(
            f"{folder} has no tests/test.sh; expected a task in Harbor's layout"
        )
    with tempfile.TemporaryDirectory(prefix="helmsman-task-") as place:
        work, logs = Path(place) / "work", Path(place) / "logs"
        logs.mkdir()
        if (folder / "environment").is_dir():
            shutil.copytree(folder / "environment", work)
        else:
            work.mkdir()
        environment = {**session.environment, "HELMSMAN_TASK": instruction}
        await run_program(command, environment, timeout=timeout, cwd=work)
        shutil.copytree(tests.parent, Path(place) / "tests")
        try:
            await run_program(
                ["bash", str(Path(place) / "tests" / "test.sh")],
                {"HELMSMAN_LOGS": str(logs)},
                timeout=verifier_timeout,
                cwd=work,
            )
            reward = 1.0
        except ProgramFailedError:
            reward = 0.0
        found = logs / "reward.txt"
        return float(found.read_text()) if found.exists() else reward
