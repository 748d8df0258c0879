"""What the example scripts share; the training loop itself is in the scripts."""
