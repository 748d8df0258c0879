"""Names of other libraries for Helmsman's objects, so that their scripts run unchanged."""
