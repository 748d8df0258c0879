"""Agent workflows: episodes, batch policies and rewards."""
