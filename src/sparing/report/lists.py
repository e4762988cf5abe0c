"""Tables of methods and recipes for the terminal."""

from __future__ import annotations

import inspect

from rich import box
from rich.table import Table

from sparing.contract import Method, Supports, list_methods
from sparing.report.terminal import Terminal
from sparing.transformers.recipe import Recipe

LETTERS = {
    "causal": "C", "key_padding": "P", "attn_mask": "M", "cross_attention": "X", "gqa": "Q", "gradient": "G",
    "decode": "D", "training_free": "T",
}  # fmt: skip


def capabilities(supports: Supports) -> str:
    """Return one letter per capability, and a dot where it is missing: "CPMXQGDT"."""
    return "".join(letter if getattr(supports, name) else "." for name, letter in LETTERS.items())


def methods_table() -> Table:
    """Return a table of what each method is and supports."""
    words = ", ".join(f"{letter} {name.replace('_', ' ')}" for name, letter in LETTERS.items())
    table = Table(
        caption=f"can: {words}. *: an oracle, which needs the exact result. All fields: docs/methods.md.",
        caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for name in ("method", "budget", "can", "what it is"):
        table.add_column(name, no_wrap=name != "what it is")
    for name, method in list_methods().items():
        star = " *" if method.oracle else ""
        table.add_row(name + star, method.budget or "-", capabilities(method.supports), _first_line(method))
    return table


def recipe_table(recipe: Recipe) -> Table:
    """Return a table of what each layer of a recipe runs."""
    table = Table(
        title=f"for {recipe.architecture or 'any architecture'}; layers without a name run the model's own attention",
        title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for column in ("layers", "method", "seed", "when"):
        table.add_column(column)
    for name, spec in recipe.layers.items():
        table.add_row(name, spec or "the model's own", str(recipe.seed_of(name)), recipe.when_of(name))
    return table


def show_recipe(recipe: Recipe, console: Terminal) -> None:
    """Print what a recipe runs in which layer, and what it says about itself."""
    console.print(recipe_table(recipe))
    for name, value in recipe.about.items():
        console.print(f"{name}: {value}".replace("\n", " "))  # a line of its own could pass for ours


def _first_line(method: type[Method]) -> str:
    return (inspect.getdoc(method) or "").splitlines()[0].rstrip(".")
