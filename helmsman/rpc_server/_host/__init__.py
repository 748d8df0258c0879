"""The engine host: named engines, their threads, and the verbs that they serve."""
