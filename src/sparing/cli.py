"""The `sparing` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from sparing.commands import bench, compare, lists, plan, study, train
from sparing.report.printable import one_line


class _Parser(argparse.ArgumentParser):
    """Argparse repeats words that it does not know; a pattern of the shell may have put names of files there."""

    def error(self, message: str) -> NoReturn:
        super().error(one_line(message))


_COMMANDS = (compare, plan, bench, train, study, lists)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run one sub-command; errors of the user print one line and give status 2."""
    parser = _Parser(
        prog="sparing", description="Approximate attention, measured on your model, your documents, your machine."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command in _COMMANDS:
        command.add(commands)
    for each in commands.choices.values():
        each.add_argument("--debug", action="store_true", help="show where an error came from")
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except Exception as error:
        if options.debug:
            raise
        expected = isinstance(error, ValueError | TypeError | ModuleNotFoundError | OSError | MemoryError)
        said = str(error) if expected else f"{type(error).__name__}: {error} (--debug shows where)"
        sys.stderr.write(f"sparing {options.command}: {one_line(said)}\n")
        return 2
    except KeyboardInterrupt:
        kept = "" if getattr(options, "no_cache", True) else "; what was measured is kept, the same command goes on"
        sys.stderr.write(f"sparing {options.command}: stopped{kept}\n")
        return 130
