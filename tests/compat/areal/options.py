"""A server that answers each connection with its options; a task's ``cmd``."""

from __future__ import annotations

import argparse
import contextlib
import json
import socket

parser = argparse.ArgumentParser()
for name in (
    "--port",
    "--experiment-name",
    "--trial-name",
    "--role",
    "--worker-index",
    "--name-resolve-type",
    "--nfs-record-root",
    "--etcd3-addr",
    "--fileroot",
):
    parser.add_argument(name, required=True)
given = vars(parser.parse_args())
with socket.create_server(("", int(given["port"]))) as server:
    while True:
        # A caller that only checks the port has gone.
        with server.accept()[0] as caller, contextlib.suppress(ConnectionError):
            caller.sendall(json.dumps(given).encode())
