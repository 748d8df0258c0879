"""`helmsman up`: starts a Ray cluster with the first node and stops it after the program."""
