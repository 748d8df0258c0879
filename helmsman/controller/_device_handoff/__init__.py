"""Hand-over of devices between a trainer and a rollout that share them."""
