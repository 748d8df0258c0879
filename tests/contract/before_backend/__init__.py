"""Promises that the script or shared code decides before a backend acts: they run on `inline`."""
