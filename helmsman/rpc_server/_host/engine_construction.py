"""Import and construction of engines."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from helmsman.api import errors
from helmsman.api.extras import needed_by
from helmsman.api.topology import RankInfo
from helmsman.api.worker_group import GroupWorker
from helmsman.rpc_server._wire.remote_errors import clipped, traceback_text


def import_engine(worker_id: str, name: str, path: str) -> Any:
    """Import an engine's class.

    Args:
        worker_id: of this worker, for the error.
        name: of the engine, for the error.
        path: 'package.module.Class', or 'package.module:Class'.

    Raises:
        EngineImportError: The module or the class cannot be imported; an error inside the module comes with its traceback.
    """
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    try:
        if not module_name:
            raise ImportError("it has no module part")
        with needed_by(path):
            return getattr(importlib.import_module(module_name), attribute)
    except BaseException as error:
        reason = clipped(f"{type(error).__name__}: {error}")
        if not isinstance(error, (ImportError, AttributeError)):
            reason += "\n" + traceback_text(error)
        raise errors.EngineImportError(worker_id=worker_id, engine_name=name, engine_path=path, reason=reason) from error


def construct(engine_type: Any, rank_info: RankInfo | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Construct an engine; a GroupWorker has its ``rank_info`` before its constructor runs."""
    if rank_info is None or not (isinstance(engine_type, type) and issubclass(engine_type, GroupWorker)):
        return engine_type(*args, **kwargs)
    if type(engine_type).__call__ is not type.__call__:  # its metaclass makes instances in a way of its own
        engine = engine_type(*args, **kwargs)
        _set_rank_info(engine, rank_info)
        return engine
    engine = engine_type.__new__(engine_type, *args, **kwargs)
    _set_rank_info(engine, rank_info)
    engine_type.__init__(engine, *args, **kwargs)
    return engine


def _set_rank_info(engine: Any, rank_info: RankInfo) -> None:
    try:
        engine.rank_info = rank_info
    except AttributeError:  # a frozen data class
        object.__setattr__(engine, "rank_info", rank_info)
