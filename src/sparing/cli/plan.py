"""`sparing plan`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sparing.cli.files import writes
from sparing.cli.options import (
    add_quiet,
    add_subject,
    cache_of,
    console_of,
    documents_of,
    needs_cli,
    progress_bar,
    renamed,
)

_FILES = ("recipe.json", "plan.json")


def add(commands: Any) -> None:
    """Declare the options."""
    parser = commands.add_parser(
        "plan", help="choose a method for each layer within a tolerance, checked on held-out documents",
        description="Choose what each attention layer runs, so that the model is faster (or smaller) and its output "
        "stays within a tolerance. The result is a recipe for sparing.approximate.",
    )  # fmt: skip
    parser.set_defaults(run=run)
    add_subject(parser)
    parser.add_argument(
        "--tolerance", type=float, metavar="X",
        help="largest change of a document at the end of the model (default: 0.01; not for needle)",
    )  # fmt: skip
    parser.add_argument(
        "--metric", metavar="NAME",
        help="how the change is measured. Encoders: cosine. Language models: perplexity, agreement; for "
        "generation also needle. Classifiers: probability, agreement. Default: the first",
    )  # fmt: skip
    parser.add_argument(
        "--coverage", type=float, default=0.9, metavar="X",
        help="share of documents that stay within the tolerance (default: 0.9)",
    )  # fmt: skip
    parser.add_argument(
        "--confidence", type=float, metavar="X",
        help="confidence of that promise (default: 0.95; needle: always 0.975)",
    )  # fmt: skip
    parser.add_argument("--objective", default="time", metavar="NAME", help="save time or memory (default: time)")
    parser.add_argument(
        "--documents", type=int, metavar="N", help="draw N documents at random (default: 70; needle: 30 made-up texts)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N",
        help="seed of the draw and split of documents, and of stochastic methods (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--when", choices=("prefill", "decode", "always"),
        help="language models: plan prompts, layer by layer (prefill, the default), tokens that continue them "
        "(decode), or both (always)",
    )  # fmt: skip
    parser.add_argument(
        "--keep", action="store_true", help="also write a recipe that keeps the promise though its gain is not shown"
    )
    parser.add_argument(
        "--replace", action="store_true", help="let an empty recipe replace one with layers in the folder of --out"
    )
    parser.add_argument("--context", type=int, metavar="N", help="plan tokens that continue N others (default: 2000)")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="number of timed rounds (default: 7; not for generation)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="number of processes that run documents (default: one per core; not for generation)",
    )
    writes(
        parser, "--out", default="out", metavar="FOLDER", names=lambda options: _FILES,
        help=f"write {' and '.join(_FILES)} to FOLDER (default: out)",
    )  # fmt: skip
    add_quiet(parser)
    renamed(parser, "-o", "--output", new="--out FOLDER, which gets recipe.json")


def _has_layers(recipe: Path) -> bool:
    from sparing.transformers.recipe import Recipe

    try:
        return bool(Recipe.load(recipe).layers)
    except FileNotFoundError:
        return False
    except (OSError, ValueError):  # edited by hand, or of a later version
        return True


def run(options: argparse.Namespace) -> int:
    """Plan, print and write."""
    with needs_cli():
        from sparing.report.plan import show
    from sparing.spec import split_specs
    from sparing.store import write_files
    from sparing.workbench.planning.plan import plan

    specs = None if options.methods is None else split_specs(options.methods)
    recipe, figures = (Path(options.out) / name for name in _FILES)
    texts = documents_of(options)
    with progress_bar(quiet=options.quiet) as progress:
        found = plan(
            options.model, texts, tolerance=options.tolerance, metric=options.metric, objective=options.objective,
            coverage=options.coverage, confidence=options.confidence, methods=specs, length=options.length,
            documents=options.documents, extend_positions=options.extend_positions, seed=options.seed,
            rounds=options.rounds, when=options.when, context=options.context, keep=options.keep, dtype=options.dtype,
            jobs=options.jobs, cache=cache_of(options), progress=progress,
        )  # fmt: skip
    console = console_of()
    if not found.holds and not options.replace and _has_layers(recipe):
        show(found, console=console)
        console.print(
            f"wrote nothing: {recipe} holds another recipe, and this one has no layers; --replace writes it, --out "
            "names another folder",
            soft_wrap=True,
        )
        return 0
    try:
        recipe.parent.mkdir(parents=True, exist_ok=True)
        saved = json.dumps(found.recipe.with_checksum(), indent=2) + "\n"
        write_files({recipe: saved, figures: found.to_json()})
    finally:  # a full disk is no reason to hide what was found
        show(found, console=console)
    text = f'turn it on: sparing.approximate(model, "{recipe}")' if found.holds else "it leaves every layer exact"
    if not options.quiet:
        console.print(f"wrote {recipe}, {figures}; {text}", soft_wrap=True)
    return 0
