"""Parts shared by the example scripts, which contain the training loops."""
