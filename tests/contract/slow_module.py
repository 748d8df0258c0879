"""A module that takes longer to import than a start may."""

import threading

threading.Event().wait(1.0)
