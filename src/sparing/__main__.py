"""`python -m sparing` is the `sparing` command."""

from sparing.cli.main import main

raise SystemExit(main())
