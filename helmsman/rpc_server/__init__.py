"""Worker side: processes, engine host, authenticated servers and wire format."""
