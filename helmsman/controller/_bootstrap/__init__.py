"""`helmsman up`: runs on each node, starts a Ray cluster of them, and the script on the first."""
