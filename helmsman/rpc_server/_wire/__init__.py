"""Bytes between driver and worker: messages, codec, frames, encryption, authentication."""
