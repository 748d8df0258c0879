"""A service of AReaL's kind, which binds the machine's own address; its script forks it."""

from __future__ import annotations

import argparse
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from helmsman._base.interfaces import own_addresses

ADDRESS = next((each for each in own_addresses() if not each.startswith("127.")), "127.0.0.1")
"""The address that AReaL's gethostip finds on a machine with a network."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET /health with the process."""

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/health" else 404, {"pid": os.getpid()})

    def answer(self, code: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Keep the log small."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, required=True)
    return parser.parse_known_args()[0]


if __name__ == "__main__":
    given = options()
    host = ADDRESS if given.host == "0.0.0.0" else given.host
    ThreadingHTTPServer((host, given.port), Handler).serve_forever()
