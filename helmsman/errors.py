"""All errors of Helmsman; ``helmsman.api.errors`` documents the tree."""

from helmsman.api.errors import *  # noqa: F403 - the same names, under a short path
