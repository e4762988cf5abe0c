"""The `sparing` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sparing.commands import bench, compare, lists, plan

_COMMANDS = (compare, plan, bench, lists)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run one sub-command; errors of the user print one line and give status 2."""
    parser = argparse.ArgumentParser(
        prog="sparing", description="Approximate attention, measured on your model, your documents, your machine."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command in _COMMANDS:
        command.add(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, TypeError, ModuleNotFoundError, OSError) as error:
        if getattr(options, "debug", False):
            raise
        sys.stderr.write(f"sparing {options.command}: {error}\n")
        return 2
    except KeyboardInterrupt:
        if not hasattr(options, "no_cache"):
            raise
        kept = "" if options.no_cache else "; what was measured is kept, the same command goes on"
        sys.stderr.write(f"sparing {options.command}: stopped{kept}\n")
        return 130
