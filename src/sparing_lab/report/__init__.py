"""Studies and training runs in the terminal, as files and as figures."""
