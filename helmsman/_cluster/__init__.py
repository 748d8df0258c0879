"""`helmsman up`, `initialize`, and the checks of a node."""
