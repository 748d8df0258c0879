"""`helmsman replay`: repeats a kept call of a run in this process, under a debugger."""

from __future__ import annotations

import asyncio
import inspect
import os
import pdb
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from helmsman.api.errors import HelmsmanError
from helmsman.api.scheduler import EngineSpec
from helmsman.api.workers import WorkerContext, within
from helmsman.controller._operator.runs import RunNotFoundError
from helmsman.controller._transport.kept_calls import FOLDER, KeptCall
from helmsman.rpc_server._host.engine_calls import construct, import_engine
from helmsman.rpc_server._process.safe_files import private_directory, read_own
from helmsman.rpc_server._wire.codec import Payload, decode
from helmsman.rpc_server._wire.messages import Verb

_NAME = re.compile(r"([0-9]{1,18})\.call")


def kept_calls(log_dir: Path) -> dict[int, KeptCall]:
    """Return a run's kept calls by number; only of this user, since replay unpickles arguments."""
    found = {}
    try:
        with private_directory(log_dir, FOLDER, create=False) as folder:
            for match in filter(None, map(_NAME.fullmatch, os.listdir(folder))):
                path = str(log_dir / FOLDER / match[0])
                content, fd = read_own(match[0], folder, path)
                os.close(fd)
                try:
                    found[int(match[1])] = msgspec.msgpack.decode(content, type=KeptCall)
                except (msgspec.MsgspecError, RecursionError) as error:
                    raise HelmsmanError(
                        f"the call in {path} cannot be read: {error}, expected one of this version "
                        "of Helmsman. Remove it, or use the version that has kept it"
                    ) from error
    except FileNotFoundError:
        return {}
    return dict(sorted(found.items()))


def describe_calls(calls: dict[int, KeptCall]) -> str:
    """List the calls that can be repeated."""
    return "\n".join(
        f"{number}: {call.request.method} on {call.worker_id}, {len(call.payload)} bytes"
        for number, call in calls.items()
        if call.before
    )


def replay(calls: dict[int, KeptCall], number: int, *, debugger: bool) -> Any:
    """Construct the engine of a kept call here, prepare it as then, and repeat the call.

    The engine has its initial weights, and those of the calls that prepared it. A debugger is pdb,
    which stops at the first line of the method.

    Raises:
        RunNotFoundError: There is no such call.
        HelmsmanError: An argument was a handle, whose value ended with the run.
    """
    call = calls.get(number)
    if call is None or not call.before:
        known = describe_calls(calls) or "no call; scheduler.reporter.keep_calls keeps some"
        raise RunNotFoundError(f"call {number} was not kept. The run has kept:\n{known}")
    engines: dict[str | None, Any] = {}
    with within(WorkerContext(worker_id=call.worker_id, node="127.0.0.1")):
        for each in [calls[before] for before in call.before]:
            if each.request.verb is Verb.CREATE_ENGINE:
                engine, args, kwargs = _arguments(each)
                name = each.request.engine_name
                spec = engine if isinstance(engine, EngineSpec) else EngineSpec(target=engine)
                kind: Any = spec.target
                if isinstance(kind, str):
                    kind = import_engine(each.worker_id, str(name), kind)
                kwargs = {**spec.kwargs, **kwargs}
                engines[name] = construct(kind, spec.rank_info, args, kwargs)
            elif each.request.verb is Verb.CALL:
                _call(engines, each)
        return _call(engines, call, debugger=debugger)


def _call(engines: dict[str | None, Any], call: KeptCall, *, debugger: bool = False) -> Any:
    method = getattr(engines[call.request.engine_name or call.worker_id], call.request.method)
    args, kwargs = _arguments(call)
    if not debugger:
        return _settled(method, *args, **kwargs)
    is_async = inspect.iscoroutinefunction(method)
    return pdb.Pdb().runcall(*([_settled] if is_async else []), method, *args, **kwargs)


def _settled(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    async def result() -> Any:
        return await outcome

    outcome = method(*args, **kwargs)
    return asyncio.run(result()) if inspect.isawaitable(outcome) else outcome


def _arguments(call: KeptCall) -> Any:
    payload: Payload = pickle.loads(call.payload)

    def lost(handle: Any) -> Any:
        raise HelmsmanError(
            f"call {call.request.id} on {call.worker_id} had the handle {handle.id} as an "
            "argument, whose value ended with the run"
        )

    return decode(payload, resolve=lost)
