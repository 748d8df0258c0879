"""TrainController, recovery, checkpoints, and the hand-over of shared devices."""
