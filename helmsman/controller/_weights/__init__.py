"""The script's half of a weight sync."""
