"""Parts of the Hugging Face rollout engine: the decode loop and its cache."""
