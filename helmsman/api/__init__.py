"""Contracts between the parts of Helmsman.

This package imports no other part of Helmsman and no Ray. torch is imported only when a platform is
resolved.
"""
