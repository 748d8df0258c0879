"""A server that starts slowly, then fails or serves; its arguments are PORT fail|serve."""

import socket
import sys
import threading

threading.Event().wait(1.5)
if sys.argv[2] == "fail":
    sys.exit(3)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    server.accept()[0].close()
