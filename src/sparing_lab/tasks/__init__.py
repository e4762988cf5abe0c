"""Data sets and tasks to train or measure on."""
