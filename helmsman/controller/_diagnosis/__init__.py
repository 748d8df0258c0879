"""Diagnoses of a run: pure functions over two snapshots; see `helmsman why`."""
