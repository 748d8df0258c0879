"""Keys of process groups: a process without its group's key cannot use the group's store."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Iterable

from helmsman._wire.tls import uses_tls

KEY_VARIABLE = "HELMSMAN_GROUP_KEY"
"""Environment variable of a training job's ranks: the key of their process group."""

_SECRET = secrets.token_bytes(32)
_TLS, _PLAIN = "tls:", "plain:"


def group_key(name: str, addresses: Iterable[str]) -> str:
    """Return the key of a group, which is the same for each call of this process.

    Args:
        name: Name of the group, unique in this process.
        addresses: Addresses of its members. Between several, connections use TLS, unless
            HELMSMAN_TLS is 0.
    """
    mode = _TLS if len(set(addresses)) > 1 and uses_tls(os.environ) else _PLAIN
    return mode + hmac.new(_SECRET, (mode + name).encode(), "sha256").hexdigest()


def needs_tls(key: str) -> bool:
    """Return whether the connections of a group with this key use TLS."""
    return key.startswith(_TLS)
