"""Schedulers: the shared base, the role registry, and the local and inline backends."""
