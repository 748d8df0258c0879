"""The event loop of the driver, its threads and deadlines."""
