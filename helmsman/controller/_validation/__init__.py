"""Checks of the arguments that users pass."""
