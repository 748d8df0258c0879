"""Connections that authenticate both ends, for the script, its workers and their engines."""
