"""Weight transfer between engines."""
