"""The APIs that agents speak: Chat Completions, Responses and Anthropic's Messages."""
