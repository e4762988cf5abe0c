"""Retrieval from the context: facts hidden in long texts, and whether a model still finds them."""
