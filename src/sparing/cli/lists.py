"""`sparing methods`, `sparing show` and `sparing report`."""

from __future__ import annotations

import argparse
from typing import Any

from sparing.cli.files import reads, writes
from sparing.cli.options import console_of, shown_and_written
from sparing.from_json import read_text


def add(commands: Any) -> None:
    """Declare the options of all three."""
    commands.add_parser("methods", help="what each method is, and what it can do").set_defaults(run=_methods)
    show = commands.add_parser("show", help="what a recipe says about the layers of a model")
    show.set_defaults(run=_show)
    reads(show, "recipe", help="a JSON file, as sparing.Recipe saves it")
    report = commands.add_parser("report", help="a comparison that compare --json wrote, once more")
    report.set_defaults(run=_report)
    reads(report, "result", help="the JSON file")
    report.add_argument("--layers", action="store_true", help="errors layer by layer too")
    writes(report, "--html", metavar="FILE", help="write a page to read, which needs no network")


def _methods(options: argparse.Namespace) -> int:
    console = console_of()
    from sparing.report.lists import methods_table

    console.print(methods_table())
    return 0


def _show(options: argparse.Namespace) -> int:
    console = console_of()
    from sparing.report.lists import recipe_table
    from sparing.transformers import Recipe

    recipe = Recipe.load(options.recipe)
    console.print(recipe_table(recipe))
    for name, value in recipe.about.items():
        console.print(f"{name}: {value}".replace("\n", " "))  # a line of its own could pass for ours
    return 0


def _report(options: argparse.Namespace) -> int:
    console = console_of()
    from sparing.workbench.comparison.verdict import Comparison

    try:
        found = Comparison.from_json(read_text(options.result, "result", "as compare --json writes it"))
    except ValueError as error:
        raise ValueError(f"{options.result}: {error}") from None
    shown_and_written(found, options, console=console)
    return 0
