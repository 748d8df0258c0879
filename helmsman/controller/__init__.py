"""Driver side of Helmsman: the scheduler, and the controllers of training and rollouts."""
