"""Connectors to environments: OpenEnv, Gymnasium, verifiers, NeMo Gym and task folders."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from helmsman import HelmsmanError
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
) -> None:
    """Play an episode of an environment, in which each turn of the model is an action.

    The environment has ``reset()`` and ``step(action)``, both sync or async. A step returns an
    object with ``observation``, ``reward`` and ``done``, as OpenEnv's clients do, or Gymnasium's
    tuple. Each step's reward is set on the turn that chose the action, and adds to the session's.

    Args:
        environment: The environment.
        session: The session that runs the model.
        action: Converts the model's message (in the Chat Completions format) to an action.
        observation: Converts an observation to a text, or to Chat Completions messages.
        tools: Functions that the model may call, in the Chat Completions format.
        max_turns: Maximum number of turns of the model.

    Raises:
        BadRequestError: A limit of the session is reached.
        HelmsmanError: The model is not available.
        Exception: The environment's own errors.
    """
    seen, _, is_done = _unpacked(await _awaited(environment.reset()))
    messages: list[Mapping[str, Any]] = []
    for _ in range(max_turns):
        if is_done:
            break
        shown = observation(seen)
        messages += [{"role": "user", "content": shown}] if isinstance(shown, str) else list(shown)
        message = await session.complete(messages, tools=tools)
        messages.append(message)
        seen, reward, is_done = _unpacked(await _awaited(environment.step(action(message))))
        session.set_turn_reward(-1, reward)


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


async def run_verifiers(environment: Any, task: Any, session: AgentSession) -> float:
    """Run an episode of an environment of ``verifiers``, with its own harness and scoring.

    Args:
        environment: A ``verifiers.v1.Env``; within its ``serving()`` if its tasks share tools.
        task: One of its taskset.
        session: The session of all its agents that have no client of their own.

    Returns:
        The sum of the rewards of its trainable agents.

    Raises:
        HelmsmanError: The episode failed.
    """
    import verifiers.v1 as vf

    variable = f"HELMSMAN_API_KEY_{session.id}"  # verifiers reads keys from the environment only
    os.environ[variable] = session.key
    try:
        client = vf.EvalClientConfig(base_url=session.base_url, api_key_var=variable)
        episode = await environment.run_episode(task, vf.ModelContext("policy", client))
    finally:
        del os.environ[variable]
    if not episode.ok:
        errors = [each.message for part in (episode, *episode.traces) for each in part.errors]
        raise HelmsmanError(f"the verifiers episode failed: {'; '.join(errors)}")
    return float(sum(trace.reward for trace in episode.traces if trace.agent.trainable))


async def run_nemo_gym(
    url: str, row: Mapping[str, Any], session: AgentSession, *, max_turns: int = 32
) -> float:
    """Run an episode on a resources server of NeMo Gym, without its agent and model servers.

    One model server of NeMo Gym serves all episodes with one key, but each needs a session's key.

    Args:
        url: URL of the resources server.
        row: A row of its dataset, with ``responses_create_params``.
        session: The session in which the model is used.
        max_turns: Maximum number of turns of the model.

    Returns:
        The reward.

    Raises:
        aiohttp.ClientError: A server cannot be reached, or refused a request other than a tool's.
        TimeoutError: A request took longer than 10 minutes.
    """
    import aiohttp

    jar = aiohttp.CookieJar(unsafe=True)  # a cookie identifies the episode, also at IP addresses
    limit, params = aiohttp.ClientTimeout(total=600.0), row["responses_create_params"]
    given, tools = params["input"], {each.get("name") for each in params.get("tools") or ()}
    given = [{"role": "user", "content": given}] if isinstance(given, str) else given
    response: dict[str, Any] = {}
    output: list[Any] = []
    async with aiohttp.ClientSession(cookie_jar=jar, timeout=limit) as http:

        async def post(url: str, body: str, *, key: str = "", raises: bool = True) -> str:
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            async with http.post(url, data=body, headers=headers, raise_for_status=raises) as found:
                return await found.text()

        await post(f"{url}/seed_session", json.dumps(row))
        for _ in range(max_turns):
            body = json.dumps({**params, "input": [*given, *output]})
            turn = await post(f"{session.base_url}/responses", body, key=session.key)
            response = json.loads(turn)
            output += response["output"]
            calls = [each for each in response["output"] if each["type"] == "function_call"]
            for call in calls:
                result = "Error: there is no such tool"
                if call["name"] in tools:
                    result = await post(f"{url}/{call['name']}", call["arguments"], raises=False)
                item = {"type": "function_call_output", "call_id": call["call_id"]}
                output.append({**item, "output": result})
            if not calls:
                break
        response |= {"output": output, "usage": None}  # its usage is that of the last turn
        verified = await post(f"{url}/verify", json.dumps({**row, "response": response}))
    return float(json.loads(verified)["reward"])


async def run_task_folder(
    folder: str | Path,
    command: str | Sequence[str],
    session: AgentSession,
    *,
    timeout: float | None = None,
    verifier_timeout: float | None = None,
) -> float:
    """Run an agent's program on a task in Harbor's layout, without a container.

    The folder has ``instruction.md`` and ``tests/test.sh``, and the files of the task in
    ``environment/``. The program runs in a copy of these files; then the tests run there. They
    write the reward to ``reward.json`` or ``reward.txt`` in ``$HELMSMAN_LOGS``, which replaces
    Harbor's ``/logs/verifier``; without a file, it is 1 if they exit with 0, else 0.
    Programs run with the rights of this user: use containers for untrusted ones.

    Args:
        folder: The folder of the task.
        command: The agent's program; it finds the instruction in HELMSMAN_TASK.
        session: The session in which the model is used.
        timeout: Limit of the program in seconds; when None, that of ``task.toml``, else 600.
        verifier_timeout: Limit of the tests in seconds; when None, as for ``timeout``.

    Returns:
        The reward.

    Raises:
        FileNotFoundError: The folder has no instruction or tests.
        TimeoutError: The program or the tests did not end in time.
        ProgramFailedError: The program exited with an error.
        ValueError: task.toml or the file of the reward cannot be decoded.
        KeyError: reward.json has no ``reward``.
    """
    folder = Path(folder)
    instruction = (folder / "instruction.md").read_text()
    tests = folder / "tests" / "test.sh"
    if not tests.is_file():
        raise FileNotFoundError(
            f"{folder} has no tests/test.sh; expected a task in Harbor's layout"
        )
    config = folder / "task.toml"
    found = tomllib.loads(config.read_text()) if config.is_file() else {}
    limits = [found.get(part, {}).get("timeout_sec", 600.0) for part in ("agent", "verifier")]
    with tempfile.TemporaryDirectory(prefix="helmsman-task-") as place:
        work, logs = Path(place) / "work", Path(place) / "logs"
        logs.mkdir()
        if (folder / "environment").is_dir():
            await asyncio.to_thread(shutil.copytree, folder / "environment", work)
        else:
            work.mkdir()
        environment = {**session.environment, "HELMSMAN_TASK": instruction}
        limit = limits[0] if timeout is None else timeout
        await run_program(command, environment, timeout=limit, cwd=work)
        await asyncio.to_thread(shutil.copytree, tests.parent, Path(place) / "tests")
        try:
            await run_program(
                ["bash", str(Path(place) / "tests" / "test.sh")],
                {"HELMSMAN_LOGS": str(logs)},
                timeout=limits[1] if verifier_timeout is None else verifier_timeout,
                cwd=work,
            )
            reward = 1.0
        except ProgramFailedError:
            reward = 0.0
        if (logs / "reward.json").exists():
            return float(json.loads((logs / "reward.json").read_text())["reward"])
        written = logs / "reward.txt"
        return float(written.read_text()) if written.exists() else reward
