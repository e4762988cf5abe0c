"""`sparing bench`: time and memory of every method against exact attention, over the length."""
