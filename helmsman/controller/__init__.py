"""Driver side of Helmsman: schedulers, controllers and the command line."""
