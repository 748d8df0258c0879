"""Which Ray cluster is meant. A wrong guess would put the run into a stranger's cluster, so there is no guessing."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import sys

import ray
from ray._private import services

from helmsman.api.errors import AmbiguousAddressError, ClusterNotFoundError, ClusterNotUpError
from helmsman.controller._node.launchers import find_many_nodes

log = logging.getLogger(__name__)

_ANSWER_S = 5.0


def choose_address(address: str | None) -> str | None:
    """The address to connect to, 'local' for an embedded cluster; None to stay with the one this process is connected to.

    Args:
        address: as the script gave it; RAY_ADDRESS when None, and 'local' without that. 'auto' means the one cluster that runs
            on this machine.
    Raises: AmbiguousAddressError, ClusterNotFoundError, ClusterNotUpError (a launcher has started this on several nodes, and
        nothing names their cluster).
    """
    wanted = address or os.environ.get("RAY_ADDRESS") or "local"
    if wanted == "auto":
        wanted = _the_one_on_this_machine()
    if not ray.is_initialized():
        if wanted == "local":
            _require_one_node(is_chosen=bool(address or os.environ.get("RAY_ADDRESS")))
        require_answer(wanted)
        return wanted
    connected = ray.get_runtime_context().gcs_address
    if address is not None and wanted != connected:
        raise AmbiguousAddressError(
            asked=f"address={address!r}",
            candidates=[f"{connected}, to which this process is connected already", f"{wanted}, which is asked for"],
            step="Leave the address out to use the connected cluster, or call ray.shutdown() first",
        )
    return None


def _require_one_node(*, is_chosen: bool) -> None:
    """Raise ClusterNotUpError where each of several nodes would start a Ray of its own and train alone.

    Args:
        is_chosen: whether the user has asked for 'local', which is then only logged.
    """
    said = find_many_nodes(os.environ)
    if said is None:
        return
    facts = [fact.said_by for fact in (said.rank, said.count, said.head) if fact is not None]
    if is_chosen:
        log.warning("Ray starts on this node alone, as address 'local' asks, in a job of several (%s)", ", ".join(facts))
        return
    command = shlex.join(sys.orig_argv) or "python train.py"
    raise ClusterNotUpError(launcher=said.launcher, said=facts, command=f"helmsman up -- {command}")


def require_answer(address: str) -> None:
    """Raise ClusterNotFoundError within seconds where nobody listens; Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if address == "local" or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except OSError as error:
        raise ClusterNotFoundError(asked=address, reason=f"nobody answers there ({error})") from error


def _the_one_on_this_machine() -> str:
    found: list[str] = sorted(services._find_address_from_flag("--gcs-address"))
    if not found:
        raise ClusterNotFoundError(asked="auto", reason="no Ray runs on this machine")
    if len(found) > 1:
        raise AmbiguousAddressError(
            asked="address 'auto'", candidates=found, step="Give the address of the one you mean, as address= or in RAY_ADDRESS"
        )
    return found[0]
