"""`python -m sparing` is the `sparing` command."""

from sparing.cli import main

raise SystemExit(main())
