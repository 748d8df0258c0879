"""`helmsman up`: Ray clusters that start with the first node and end with the last program."""
