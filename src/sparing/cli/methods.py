"""`sparing methods`."""

from __future__ import annotations

import argparse
from typing import Any

from sparing.cli.options import console_of


def add(commands: Any) -> None:
    """Declare the options."""
    parser = commands.add_parser("methods", help="list the methods and what each supports")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table of methods."""
    console = console_of()
    from sparing.report.lists import methods_table

    console.print(methods_table())
    return 0
