"""Measure a call or a model: how wrong, how much work, how fast, and what follows from it."""
