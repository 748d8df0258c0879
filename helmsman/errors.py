"""All errors of Helmsman; ``helmsman.api.errors`` shows them as a tree."""

from helmsman.api.errors import *  # noqa: F403 - the same names, under a short path
