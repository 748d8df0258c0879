"""Process that an embedded cluster's raylet starts in place of a Python worker.

It requests the worker from the fork server. It imports only built-in modules, so it starts in a few
milliseconds. It passes its arguments, environment, folder and standard streams to the fork server,
and lives as long as the worker: if the raylet kills it, the worker ends, too. If the fork server
refuses, or does not run, this process becomes the worker that Ray would have started.
"""

import _socket
import posix
import sys

ADDRESS_VARIABLE = b"HELMSMAN_RAY_FORKSERVER"
"""Environment variable of the raylet: the fork server's key, a colon, its abstract socket name."""
GREETING, FORKED = b"?", b"f"

_GREETING_S = 20.0
"""Longest wait for a fork server that is still importing; a normal start is faster then."""


def request(
    key: bytes, folder: str, arguments: list[str], environment: dict[bytes, bytes]
) -> bytes:
    """Encode a request: fields separated by zero bytes, which none of them can contain."""
    words = [
        argument.encode(sys.getfilesystemencoding(), "surrogateescape")
        for argument in (folder, *arguments)
    ]
    variables = [name + b"=" + value for name, value in environment.items()]
    return b"\0".join([key, b"%d" % len(arguments), *words, *variables])


def _is_forked(address: bytes, environment: dict[bytes, bytes]) -> bool:
    key, _, name = address.partition(b":")
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_GREETING_S)
        connection.connect(b"\0" + name)
        if connection.recv(1) != GREETING:
            return False
        descriptors = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
        connection.sendmsg(
            [request(key, posix.getcwd(), sys.argv[1:], environment)],
            [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)],
        )
        connection.settimeout(None)
        if connection.recv(1) != FORKED:
            return False
    except OSError:
        return False
    connection.recv(1)  # nothing more is sent: this returns when the worker ends
    return True


def main() -> None:
    environment = dict(posix.environ)
    address = environment.pop(ADDRESS_VARIABLE, b"")
    if _is_forked(address, environment):
        return
    # Ray omits its set-up program for workers without a runtime environment. It cannot do so
    # in a command that begins with this client, so the program is dropped here.
    has_setup = any(argument.startswith("--language=") for argument in sys.argv)
    command = sys.argv[1:] if has_setup else sys.argv[2:]
    posix.execve(sys.executable, [sys.executable, *command], environment)


if __name__ == "__main__":
    main()
