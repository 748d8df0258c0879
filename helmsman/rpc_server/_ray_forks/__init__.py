"""Forking of the workers of an embedded Ray. `install` is the entry point."""
