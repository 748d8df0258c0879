"""Network interfaces of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915


def ipv4_interfaces() -> dict[str, str]:
    """Return the IPv4 addresses by interface; '' for an interface without one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            found[name] = ""
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(
                    probe, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15])
                )
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def own_addresses() -> list[str]:
    """Return this machine's IPv4 addresses, and its IPv6 addresses beyond a link or the host."""
    found = [address for address in ipv4_interfaces().values() if address]
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for digits, _, _, scope, *_ in map(str.split, file):
            if scope == "00":  # global
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found
