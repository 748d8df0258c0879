"""The driver's background event loop and deadlines."""
