"""Training controllers: batch split, checkpoints, recovery."""
