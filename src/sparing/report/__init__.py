"""Results as something to read."""
