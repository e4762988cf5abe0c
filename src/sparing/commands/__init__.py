"""The sub-commands of `sparing`, a file each: `add` declares its options, `run` does the work."""
