"""Bytes between script and workers: codec, frames, segments, session, authentication, TLS."""
