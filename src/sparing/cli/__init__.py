"""The `sparing` command, with a module for each verb."""
