"""Datasets, and the tasks to train and measure models on."""
