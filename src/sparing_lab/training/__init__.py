"""Training with any method: `sparing train`."""
