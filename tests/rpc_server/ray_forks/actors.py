"""A module that the fork server imports: Ray gives each class of actors a random id."""

from __future__ import annotations

import ray


@ray.remote
class Preloaded:
    """An actor that no test starts."""
