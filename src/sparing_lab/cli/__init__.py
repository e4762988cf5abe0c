"""The commands `sparing study` and `sparing train`."""
