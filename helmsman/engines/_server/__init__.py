"""Parts of the server engine: processes, dialects and requests of OpenAI-compatible servers."""
