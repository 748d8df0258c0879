"""Fault injection: plans, the injector, and the check of each fault."""
