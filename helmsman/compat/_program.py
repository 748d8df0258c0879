"""Replaces this process by a program and its arguments, as AReaL starts a ``cmd``.

``python -m helmsman.compat._program python x.py --port 20001`` runs ``x.py`` with this interpreter.
"""

import os
import sys

if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    if program.startswith("python"):
        program = sys.executable
    os.execvp(program, [program, *arguments])
