"""Worker side: the engine host, its authenticated servers, and the forkservers."""
