"""The script's end of a worker: connection, pending calls, deadlines, health."""
