"""A server that ends in a way of its own: ``listener.py PORT [ends|killed|until PATH]``."""

import os
import signal
import socket
import sys

how = sys.argv[2] if len(sys.argv) > 2 else ""
if how == "ends":
    sys.exit(0)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
with socket.create_server(("127.0.0.1", int(sys.argv[1])), reuse_port=False) as server:
    server.settimeout(0.05)
    while how != "until" or not os.path.exists(sys.argv[3]):
        try:
            server.accept()[0].close()
        except TimeoutError:
            continue
