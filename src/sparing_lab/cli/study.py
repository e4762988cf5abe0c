"""The command `sparing study`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sparing.cli.files import reads, writes
from sparing.cli.options import add_cache, cache_of, console_of, needs_cli, progress_bar

LEDGER = "docs/reproduction.md"


def add(commands: Any) -> None:
    """Declare the options."""
    parser = commands.add_parser("study", help="a table or figure of the papers, measured again, with a verdict")
    parser.set_defaults(run=run)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of studies; --list shows them")
    parser.add_argument("--list", action="store_true", help="list the studies")
    parser.add_argument("--all", action="store_true", help="run every study")
    parser.add_argument(
        "--scale", default="small",
        help="small: minutes, nothing is downloaded; paper: its models, data and settings (default: small)",
    )  # fmt: skip
    reads(parser, "--data", metavar="FOLDER", help="a folder of datasets: glue/, imdb/, hyperpartisan/ and others")
    reads(parser, "--model", help="a model to use instead of the study's: a folder or a name on the hub")
    parser.add_argument(
        "--seeds", type=int, help="number of random seeds for stochastic methods (default: the study's)"
    )
    writes(
        parser, "--out", default="studies", metavar="FOLDER", help="the folder for figures and JSON (default: studies)",
        names=lambda options: [f"{name}.{form}" for name in _names(options) for form in ("json", "png")],
    )  # fmt: skip
    writes(
        parser, "--write-docs", nargs="?", const=LEDGER, metavar="FILE",
        help=f"with --all: write the ledger of all claims (default: {LEDGER})",
    )  # fmt: skip
    add_cache(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    with needs_cli():
        from sparing_lab.report import study as report
    from sparing.store import write_files
    from sparing_lab.figure import need_matplotlib
    from sparing_lab.studies import study
    from sparing_lab.studies.run import Outcome, write
    from sparing_lab.studies.run import run as measure
    from sparing_lab.studies.study import Settings

    console = console_of()
    if options.list:
        console.print(report.list_table())
        return 0
    names = _names(options)
    if not names:
        raise ValueError("name a study, or ask for --all; --list shows what there is")
    if options.write_docs is not None and not options.all:
        raise ValueError("--write-docs needs --all: the ledger holds every claim")
    studies = [study(name) for name in names]
    settings = Settings(
        options.scale, None if options.data is None else Path(options.data), options.seeds, options.model,
        together=len(names) > 1,
    )  # fmt: skip
    report.refuse_unused(studies, settings)
    need_matplotlib()
    folder = Path(options.out)
    store = cache_of(options)
    store.prepare()
    outcomes: list[Outcome] = []
    for each in studies:
        with progress_bar() as progress:
            outcomes.append(measure(each, settings, store, progress=progress))
        try:
            written = write(outcomes[-1], folder)
        finally:  # a full disk is no reason to hide what was measured
            report.show(outcomes[-1], console=console)
        console.print(f"wrote {', '.join(map(str, written))}", soft_wrap=True)
    if len(outcomes) > 1:
        report.show_all(outcomes, console=console)
    if options.write_docs is not None:
        write_files({Path(options.write_docs): report.ledger(outcomes)})
        console.print(f"wrote {options.write_docs}", soft_wrap=True)
    return 0


def _names(options: argparse.Namespace) -> list[str]:
    """Return the names of the studies that are asked for."""
    from sparing_lab.studies import NAMES

    return list(NAMES) if options.all else list(dict.fromkeys(options.names))
