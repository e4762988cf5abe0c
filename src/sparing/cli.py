"""The `sparing` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run one sub-command; errors of the user print one line and give status 2."""
    parser = argparse.ArgumentParser(prog="sparing", description="Approximate attention, measured on real layers.")
    commands = parser.add_subparsers(dest="command", required=True)
    compare = commands.add_parser(
        "compare", help="every method on the real layers of the MiniLM encoder: error, FLOPs, time, capabilities"
    )
    compare.add_argument("--methods", help="comma-separated specs, such as 'exact,nystrom(landmarks=32)'; default: all")
    compare.add_argument("--length", type=int, default=512, help="tokens per document, at most 512 (default: 512)")
    compare.add_argument("--documents", type=int, default=2, help="documents to average over (default: 2)")
    options = parser.parse_args(arguments)
    try:
        return _compare(options)
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        sys.stderr.write(f"sparing {options.command}: {error}\n")
        return 2


def _compare(options: argparse.Namespace) -> int:
    from sparing.measure.compare import BUDGETS, compare
    from sparing.method import method
    from sparing.spec import split_specs

    specs = split_specs(options.methods) if options.methods else BUDGETS
    chosen = [method(spec) for spec in specs]
    if not chosen:
        raise ValueError(f"--methods={options.methods!r} names no method")
    if not 2 <= options.length <= 512:
        raise ValueError(f"--length={options.length} must be from 2 to 512, the positions of the model")
    if options.documents < 1:
        raise ValueError(f"--documents={options.documents} must be at least 1")
    try:
        from rich.console import Console
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is missing; run: pip install 'sparing[cli]'") from None
    from sparing.measure.capture import capture
    from sparing.report.table import show
    from sparing.tasks import minilm

    logging.disable_progress_bar()
    with Console(stderr=True).status("loading MiniLM") as status:
        encoder = minilm.load()
        ids = minilm.token_ids(encoder, length=options.length, documents=options.documents)
        layers = capture(encoder.model, input_ids=ids)
        rows = compare(layers, chosen, progress=status.update)
    size = f"{len(layers)} layers, {options.documents} documents of {options.length} tokens"
    show(rows, title=f"MiniLM, {size} (Python help topics)")
    return 0
