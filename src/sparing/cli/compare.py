"""`sparing compare`."""

from __future__ import annotations

import argparse
from typing import Any

from sparing.cli.files import writes
from sparing.cli.options import (
    add_subject,
    cache_of,
    console_of,
    documents_of,
    needs_cli,
    progress_bar,
    show_comparison,
)

BACKENDS = ("loky", "dask", "ray")


def add(commands: Any) -> None:
    """Declare the options."""
    parser = commands.add_parser(
        "compare", help="every method in your model, on your documents: how wrong, how fast, is it safe?"
    )
    parser.set_defaults(run=run)
    add_subject(parser)
    parser.add_argument(
        "--pair", metavar="COLUMN", help="of a second text, that an encoder compares or a classifier also reads"
    )
    parser.add_argument("--label", metavar="COLUMN", help="of labels, in tables: adds scores against them")
    parser.add_argument("--documents", type=int, help="how many, the first ones (default: 8)")
    parser.add_argument("--seeds", type=int, default=2, help="of methods that draw random numbers (default: 2)")
    parser.add_argument(
        "--tolerance", type=float, default=0.01, help="of the change at the end of the model (default: 0.01)"
    )
    parser.add_argument(
        "--metric",
        help="what the change is. Encoders: cosine, neighbours, accuracy; language models: perplexity, agreement; "
        "classifiers: probability, agreement, accuracy, f1, matthews, pearson, spearman; default: the first",
    )
    parser.add_argument("--rounds", type=int, default=5, help="of the timings (default: 5)")
    parser.add_argument(
        "--batch", type=int, help="documents in a padded batch whose time is taken, too; default: 4, language models 1"
    )
    parser.add_argument(
        "--lengths", action=argparse.BooleanOptionalAction, default=True,
        help="race attention calls at growing lengths, for the crossover (default: yes)",
    )  # fmt: skip
    parser.add_argument("--head", metavar="LAYER.HEAD", help="to draw in the page beside the most fragile heads")
    parser.add_argument("--jobs", type=int, help="processes that measure errors; default: one for each core")
    parser.add_argument("--layers", action="store_true", help="errors layer by layer too, and how good error bars are")
    parser.add_argument(
        "--backend", choices=BACKENDS, default="loky",
        help="who measures errors: processes of this machine (loky), or a Dask or Ray cluster (default: loky)",
    )  # fmt: skip
    parser.add_argument(
        "--cluster", metavar="ADDRESS", help="of the Dask scheduler or Ray head; default: workers on this machine"
    )
    writes(parser, "--json", metavar="FILE", help="write everything there")
    writes(parser, "--html", metavar="FILE", help="write a page to read, which needs no network")


def run(options: argparse.Namespace) -> int:
    """Compare, print, write."""
    with needs_cli():
        import rich  # noqa: F401
    from sparing.spec import split_specs
    from sparing.workbench.comparison.compare import compare
    from sparing.workbench.workers import cluster

    specs = None if options.methods is None else split_specs(options.methods)
    texts = documents_of(options)
    head = None if options.head is None else _head(options.head)
    with progress_bar() as progress, cluster(options.backend, options.cluster, options.jobs) as backend:
        found = compare(
            options.model, texts, methods=specs, length=options.length, documents=options.documents,
            seeds=options.seeds, tolerance=options.tolerance, metric=options.metric, rounds=options.rounds,
            batch=options.batch, lengths=options.lengths, head=head, extend_positions=options.extend_positions,
            jobs=options.jobs, backend=backend, cache=cache_of(options), progress=progress,
        )  # fmt: skip
    show_comparison(found, options, console=console_of())
    return 0


def _head(text: str) -> tuple[int, int]:
    layer, dot, head = text.partition(".")
    if not dot or not layer.isdecimal() or not head.isdecimal():
        raise ValueError(f"--head={text!r} must be a layer and a head, counted from 0, such as 3.7")
    return int(layer), int(head)
