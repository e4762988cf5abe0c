"""The `sparing` command, one module per sub-command."""
