"""Parts of the vLLM engine."""
