"""Calls on all workers of a role; Cluster, dispatch, ResourceManager."""
