"""Checks of arguments that users pass."""
