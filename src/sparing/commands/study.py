"""`sparing study`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sparing.commands.shared import add_cache, cache_of, console_of, needs_cli, progress_bar

LEDGER = "docs/reproduction.md"


def add(commands: Any) -> None:
    """Declare the options."""
    parser = commands.add_parser("study", help="a table or figure of the papers, measured again, with a verdict")
    parser.set_defaults(run=run)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of studies; --list shows them")
    parser.add_argument("--list", action="store_true", help="what studies there are")
    parser.add_argument("--all", action="store_true", help="every study")
    parser.add_argument(
        "--scale", default="small",
        help="small: minutes, nothing is downloaded; paper: its models, data and settings (default: small)",
    )  # fmt: skip
    parser.add_argument("--data", metavar="FOLDER", help="datasets: glue/, imdb/, hyperpartisan/ and others in it")
    parser.add_argument("--model", help="a folder or a name on the hub, in place of the study's own")
    parser.add_argument("--seeds", type=int, help="of methods that draw random numbers; default: the study's")
    parser.add_argument("--out", default="studies", metavar="FOLDER", help="for figures and JSON (default: studies)")
    parser.add_argument(
        "--write-docs", nargs="?", const=LEDGER, metavar="FILE",
        help=f"with --all: write the ledger of all claims (default: {LEDGER})",
    )  # fmt: skip
    add_cache(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    with needs_cli():
        from sparing.report import study as report
    from sparing.measure.cells import Store, write_whole
    from sparing.report.bench_files import check_folder
    from sparing.studies import NAMES, study
    from sparing.studies.figure import need_matplotlib
    from sparing.studies.run import Outcome, write
    from sparing.studies.run import run as measure
    from sparing.studies.study import Settings

    console = console_of()
    if options.list:
        console.print(report.list_table())
        return 0
    names = list(NAMES) if options.all else list(dict.fromkeys(options.names))
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
    check_folder(folder)
    if options.write_docs is not None and not Path(options.write_docs).resolve().parent.is_dir():
        raise ValueError(f"--write-docs={options.write_docs}: there is no such folder")
    store = Store(cache_of(options))
    store.prepare()
    outcomes: list[Outcome] = []
    for each in studies:
        with progress_bar() as progress:
            outcomes.append(measure(each, settings, store, progress=progress))
        report.show(outcomes[-1], console=console)
        written = write(outcomes[-1], folder)
        console.print(f"wrote {', '.join(map(str, written))}", soft_wrap=True)
    if len(outcomes) > 1:
        report.show_all(outcomes, console=console)
    if options.write_docs is not None:
        write_whole(Path(options.write_docs).resolve(), report.ledger(outcomes))
        console.print(f"wrote {options.write_docs}", soft_wrap=True)
    return 0
