"""`sparing compare`."""

from __future__ import annotations

import argparse
from typing import Any

from sparing.cli.files import writes
from sparing.cli.options import (
    COMPARE_FILES,
    add_quiet,
    add_subject,
    cache_of,
    console_of,
    documents_of,
    needs_cli,
    progress_bar,
    renamed,
    show_comparison,
)

BACKENDS = ("loky", "dask", "ray")


def add(commands: Any) -> None:
    """Declare the options."""
    parser = commands.add_parser(
        "compare", help="measure how wrong and how fast each method is in your model, on your documents",
        description="Measure every method in all attention layers of a model: the change at the end of the model, the "
        "error of each layer, the time, and a verdict.",
    )  # fmt: skip
    parser.set_defaults(run=run)
    add_subject(parser)
    parser.add_argument(
        "--pair", metavar="COLUMN",
        help="column of a second text: an encoder compares the two, a classifier reads both as one",
    )  # fmt: skip
    parser.add_argument("--label", metavar="COLUMN", help="column of labels: adds scores against them")
    parser.add_argument(
        "--documents", type=int, metavar="N",
        help="use the first N documents (default: 8), and N passages for generation (default: 3)",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=int, default=2, metavar="N", help="number of random seeds for stochastic methods (default: 2)"
    )
    parser.add_argument(
        "--tolerance", type=float, metavar="X",
        help="largest change at the end of the model that counts as safe (default: 0.01; needle: 0.1)",
    )  # fmt: skip
    parser.add_argument(
        "--metric", metavar="NAME",
        help="how the change is measured. Encoders: cosine, neighbours, accuracy. Language models: perplexity, "
        "agreement, needle. Classifiers: probability, agreement, accuracy, f1, matthews, pearson, spearman. Default: "
        "the first; for language models together with needle",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="number of timed rounds (default: 5)")
    parser.add_argument(
        "--batch-size", type=int, metavar="N",
        help="also time a padded batch of N documents (default: 4; language models: 1, no batch)",
    )  # fmt: skip
    renamed(parser, "--batch", new="--batch-size")
    parser.add_argument(
        "--lengths", action=argparse.BooleanOptionalAction, default=True,
        help="time attention calls at growing lengths, for the length from which a method is faster (default: yes)",
    )  # fmt: skip
    parser.add_argument(
        "--when", nargs="+", choices=("prefill", "decode", "always"),
        help="language models: approximate prompts (prefill), tokens that continue them (decode), or both (always) "
        "(default: prefill decode)",
    )  # fmt: skip
    parser.add_argument(
        "--contexts", type=int, nargs="*", metavar="N",
        help="language models: measure generation after N tokens, on --documents passages (default: 2000 8000, as far "
        "as model and documents allow, on 3 passages; without a number: none)",
    )  # fmt: skip
    parser.add_argument(
        "--facts", type=int, metavar="N",
        help="language models: number of contexts with facts to be found, at each length (default: 20)",
    )  # fmt: skip
    parser.add_argument(
        "--head", metavar="LAYER.HEAD", help="also draw this head on the page, beside the most fragile ones"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="number of processes that measure errors (default: one per core)"
    )
    parser.add_argument("--layers", action="store_true", help="also print the errors of each layer")
    parser.add_argument(
        "--backend", choices=BACKENDS, default="loky",
        help="where errors are measured: processes of this machine (loky), a Dask or a Ray cluster (default: loky)",
    )  # fmt: skip
    parser.add_argument(
        "--cluster", metavar="ADDRESS",
        help="address of the Dask scheduler or Ray head (default: start workers on this machine)",
    )  # fmt: skip
    writes(
        parser, "--out", metavar="FOLDER", names=lambda options: COMPARE_FILES,
        help=f"write {' and '.join(COMPARE_FILES)} to FOLDER (default: print only)",
    )  # fmt: skip
    writes(
        parser, "--json", metavar="FILE", piped=True,
        help="write the result to a JSON file of this name; - writes it to standard output, in place of the tables",
    )  # fmt: skip
    writes(parser, "--html", metavar="FILE", help="write a page that needs no network to a file of this name")
    add_quiet(parser)


def run(options: argparse.Namespace) -> int:
    """Compare, print and write."""
    with needs_cli():
        import rich  # noqa: F401
    from sparing.spec import split_specs
    from sparing.workbench.comparison.compare import compare
    from sparing.workbench.workers import cluster

    specs = None if options.methods is None else split_specs(options.methods)
    texts = documents_of(options)
    head = None if options.head is None else _head(options.head)
    with (
        progress_bar(quiet=options.quiet) as progress,
        cluster(options.backend, options.cluster, options.jobs) as backend,
    ):
        found = compare(
            options.model, texts, methods=specs, length=options.length, documents=options.documents,
            seeds=options.seeds, tolerance=options.tolerance, metric=options.metric, rounds=options.rounds,
            batch_size=options.batch_size, lengths=options.lengths, when=options.when,
            contexts=options.contexts, facts=options.facts, dtype=options.dtype, head=head,
            extend_positions=options.extend_positions, jobs=options.jobs, backend=backend, cache=cache_of(options),
            progress=progress,
        )  # fmt: skip
    show_comparison(found, options, console=console_of())
    return 0


def _head(text: str) -> tuple[int, int]:
    layer, dot, head = text.partition(".")
    if not dot or not layer.isdecimal() or not head.isdecimal():
        raise ValueError(f"--head={text!r} must be a layer and a head, counted from 0, such as 3.7")
    return int(layer), int(head)
