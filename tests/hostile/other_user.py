"""Another user of this machine, who speaks to the listeners of a run.

`python -m tests.hostile.other_user` becomes uid 65534, reads listeners as JSON, and writes the
answer of each one to each speech, as JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys

UID = 65_534
LIMIT_S = 0.5
SPEECHES = {
    "nothing": b"",
    "noise": bytes(range(256)) * 8,
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "pickle": pickle.dumps({"method": "health"}, 5),
    "length": b"\xff\xff\xff\xff" * 4,
    # Validation, then a ping that torch's TCPStore answers with the last four bytes.
    "TCPStore": b"\x00\xce\xf7\x85\x3c\x0dping",
    "gloo": (0).to_bytes(8, "little") + bytes(64),
}


def main() -> None:
    "".encode("idna")  # the other user may not read the folder of this module
    os.setgroups([])
    os.setgid(UID)
    os.setuid(UID)
    answers: list[dict[str, str]] = []
    for family, address, port in json.load(sys.stdin):
        found = {name: speak(family, address, port, data) for name, data in SPEECHES.items()}
        answers.append(found)
    json.dump(answers, sys.stdout)


def speak(family: str, address: str, port: int, data: bytes) -> str:
    """Return the bytes that came back as text, or '!' and the error's name."""
    answer = b""
    try:
        with connected(family, address, port) as peer:
            peer.sendall(data)
            while part := peer.recv(1 << 16):
                answer += part
    except OSError as error:
        return answer.decode("latin1") + f"!{type(error).__name__}"
    return answer.decode("latin1")


def connected(family: str, address: str, port: int) -> socket.socket:
    if family == "tcp":
        return socket.create_connection((address, port), timeout=LIMIT_S)
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(LIMIT_S)
    try:
        peer.connect(address.replace("@", "\0", 1))
    except BaseException:
        peer.close()
        raise
    return peer


if __name__ == "__main__":
    main()
