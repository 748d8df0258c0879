"""Conversion of an engine's exception into a Helmsman error that can be sent."""

from __future__ import annotations

import pickle
import threading
import traceback
from typing import Any

import cloudpickle

from helmsman._wire.messages import Request, Verb, WorkerIdentity
from helmsman.api import errors

OWN_PACKAGES = "helmsman.rpc_server.", "helmsman._wire.", "helmsman._process.", "helmsman._base."
"""Prefixes of modules whose frames are not shown to users."""
MAX_TEXT_CHARS = 64 * 1024
"""Longest text of an exception in characters; longer ones are truncated."""
MAX_PICKLE_BYTES = 64 * 1024
"""Largest pickled exception; of a larger one only type, message and traceback are sent."""
_MAX_TRACEBACK_CHARS = 20_000
_OFF_MAIN = "signal only works in main thread"
"""Python's own error of signal.signal."""
_USE_MAIN = (
    "Helmsman runs def methods and def rewards in the main thread of workers that LocalScheduler "
    "or RayScheduler(address='local') forks. It does not for async def, on inline, or where Ray "
    "itself starts the worker, because Ray's loop keeps that thread. Limit the time there in a "
    "child process, by multiprocessing or subprocess."
)
_MAX_LINE_CHARS = 8_000
"""Longest frame or message in a traceback, so that the frames before it are kept."""


def remote_error(
    identity: WorkerIdentity, request: Request, error: BaseException
) -> errors.HelmsmanError:
    """Convert an engine's exception. The original is included if it can be pickled."""
    message = _text(error)
    if _OFF_MAIN in message and threading.current_thread() is not threading.main_thread():
        message = f"{message}. {_USE_MAIN}"
    fields: dict[str, Any] = {
        "worker_id": identity.worker_id,
        "engine_name": request.engine_name,
        "method": request.method or request.verb.value,
        "remote_type": _type_name(error),
        "remote_message": message,
        "remote_traceback": traceback_text(error),
        "node": identity.node,
        "log_path": identity.log_path,
    }
    if request.verb is Verb.CREATE_ENGINE:
        return errors.EngineCreationError(**fields)
    try:
        # Unpickled here as well: an exception that pickles may fail to unpickle, for example for
        # required constructor arguments.
        original = cloudpickle.dumps(error)
        if len(original) > MAX_PICKLE_BYTES:
            reason = (
                f"has {len(original):,} bytes when it is pickled, and {MAX_PICKLE_BYTES:,} "
                "are sent at most"
            )
            return errors.EngineCallError(**fields, unsent=reason)
        pickle.loads(original)
    except Exception:  # noqa: BLE001 - pickling and unpickling run the exception's own code
        return errors.EngineCallError(**fields, unsent="cannot be pickled")
    return errors.EngineCallError(**fields, original=original)


def _type_name(error: BaseException) -> str:
    cls = type(error)
    return (
        cls.__qualname__
        if cls.__module__ in ("builtins", "__main__")
        else f"{cls.__module__}.{cls.__qualname__}"
    )


def clipped(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Truncate a text, with a note of its length."""
    return (
        text
        if len(text) <= limit
        else f"{text[:limit]} ... (truncated: {limit:,} of {len(text):,} characters)"
    )


def _text(error: BaseException) -> str:
    try:
        return clipped(str(error))
    except Exception as failure:  # noqa: BLE001 - a broken __str__ must not hide the error
        return f"<no text: str() raised {type(failure).__name__}>"


def traceback_text(error: BaseException) -> str:
    """Format the traceback from the engine's own frames on; only the tail if it is very long."""
    trace = error.__traceback__
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith(
        OWN_PACKAGES
    ):
        trace = trace.tb_next
    try:
        lines = traceback.format_exception(type(error), error, trace)
    except Exception:  # noqa: BLE001 - a broken __str__ breaks the formatting too
        lines = [*traceback.format_tb(trace), f"{_type_name(error)}: {_text(error)}"]
    text = "".join(
        line if len(line) <= _MAX_LINE_CHARS else f"{clipped(line, _MAX_LINE_CHARS)}\n"
        for line in lines
    )
    if len(text) <= _MAX_TRACEBACK_CHARS:
        return text
    return (
        f"(truncated: the last {_MAX_TRACEBACK_CHARS:,} of {len(text):,} "
        f"characters)\n{text[-_MAX_TRACEBACK_CHARS:]}"
    )
