"""Numbers about a call or a model: how wrong, how much work, how fast."""
