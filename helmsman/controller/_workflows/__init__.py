"""Agent workflows: episodes, bounded staleness, rewards."""
