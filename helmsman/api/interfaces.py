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
