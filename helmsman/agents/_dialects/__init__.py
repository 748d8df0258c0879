"""The APIs that agents use: Chat Completions, Responses and Anthropic's Messages."""
