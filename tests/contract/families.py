"""A command that starts two children, one in a session of its own, and writes their pids.

Its arguments are ``PORT serve|finish FILE``.
"""

import socket
import subprocess
import sys
import threading
from pathlib import Path

NAP = [sys.executable, "-c", "import threading; threading.Event().wait()"]
port, how, pids = sys.argv[1:]
children = [subprocess.Popen(NAP, start_new_session=detached) for detached in (False, True)]
Path(pids).write_text(" ".join(str(each.pid) for each in children))
if how == "serve":
    with socket.create_server(("127.0.0.1", int(port))):
        threading.Event().wait()
