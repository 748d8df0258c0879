"""A module whose import takes longer than the start limit of a test."""

import threading

threading.Event().wait(1.0)
