"""The generation-request scheduler and the health of its instances."""
