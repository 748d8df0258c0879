"""Contracts. Nothing here imports another room of Helmsman, nor Ray; torch is imported only when a
platform is resolved.
"""
