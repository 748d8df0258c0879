"""Addresses of a gateway: the ones it listens on, and the URLs by which agents reach it."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import re
import socket
import urllib.parse
from typing import Any


def checked_public_url(url: Any) -> str:
    """Return a URL given by the user, without a slash at its end.

    Raises:
        ValueError: Agents cannot reach a server by this URL.
    """
    fault = _fault(url)
    if fault:
        shown = re.sub(r"//[^/]*@", "//...@", repr(url))  # the user's name may have a password
        raise ValueError(
            f"invalid setting (public_url): {shown} {fault}, expected a URL with http or https and "
            "a host, such as 'https://agents.example.org/rl'. Give the URL by which agents reach "
            "the gateway, or None"
        )
    return str(url).rstrip("/")


def url_of_request(host: str, local: str, port: int) -> str:
    """Return the URL by which a request came.

    Args:
        host: The request's Host header; '' if it has none.
        local: The local address of its connection, which replaces a header without a valid host.
        port: The local port.
    """
    url = f"http://{host}"
    is_valid = "/" not in host and not _fault(url)
    return url if is_valid else url_of(_unmapped(local.partition("%")[0]), port)


def url_of(host: str, port: int) -> str:
    """Return the URL of an address or a host name."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def listen(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Listen on the addresses of a host; on all of IPv6 and IPv4 if they stand for all.

    Args:
        host: Address or name; '' for all addresses.
        port: Port; 0 for a free one.
        backlog: Length of the queues of connections in the kernel.

    Raises:
        OSError: The port is taken, or no address is this node's.
        UnicodeError: The host is not a name.
        OverflowError: The port is not one.
    """
    both = socket.has_dualstack_ipv6()
    host = host or ("::" if both else "0.0.0.0")
    if ":" in host and is_all(host):
        family = socket.AF_INET6
        return [
            socket.create_server(("::", port), family=family, backlog=backlog, dualstack_ipv6=both)
        ]
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    failed: OSError | None = None
    for family, address in dict.fromkeys((each[0], each[4]) for each in found):
        try:
            sockets.append(socket.create_server(address, family=family, backlog=backlog))
        except OSError as error:
            # A name may have addresses of a family that this node lacks.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for each in sockets:
                    each.close()
                raise
            failed = error
    if not sockets and failed is not None:
        raise failed
    return sockets


def is_all(address: str) -> bool:
    """Return whether an address stands for all addresses of a node, such as 0.0.0.0."""
    try:
        return ipaddress.ip_address(_unmapped(address)).is_unspecified
    except ValueError:
        return False


def node_address(bound: str) -> str:
    """Return the node's address for other nodes, of a family that a server receives.

    It is that of the route to the internet, or loopback without a route. Nothing is sent.

    Args:
        bound: The address of all that the server listens on.
    """
    routes = [(socket.AF_INET, "192.0.2.1", "127.0.0.1"), (socket.AF_INET6, "2001:db8::1", "::1")]
    if ":" not in bound:
        routes = routes[:1]
    elif not socket.has_dualstack_ipv6():
        routes = routes[1:]
    for family, target, _ in routes:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return routes[0][2]


def _unmapped(address: str) -> str:
    """Return the IPv4 address for which an IPv6 address stands in a socket of both families."""
    found = re.fullmatch(r"::ffff:(\d+\.\d+\.\d+\.\d+)", address, re.IGNORECASE)
    return found[1] if found else address


def _fault(url: Any) -> str:
    """Return why no server can be reached by a URL; '' if there is no such reason."""
    if not isinstance(url, str) or not re.fullmatch(r"[!-~]*", url) or "\\" in url:
        return "is not a text of ASCII without spaces"
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        return f"is malformed ({error})"
    if parts.scheme not in ("http", "https"):
        return "does not begin with http:// or https://"
    if "@" in parts.netloc:
        return "has a user name"
    if not _is_host(host):
        return "has no valid host"
    if is_all(host):
        return f"has {host}, which is an address to listen on"
    if port == 0 or parts.netloc.endswith(":"):
        return "has no valid port"
    if "?" in url or "#" in url:
        return "has a query or a fragment"
    return ""


def _is_host(host: str) -> bool:
    if ":" not in host:
        return bool(re.fullmatch(r"[\w.-]+", host))
    try:
        return "%" not in host and bool(ipaddress.IPv6Address(host))
    except ValueError:
        return False
