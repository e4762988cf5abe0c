"""Write a comparison as one HTML page that needs no server, no network and no other file."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

from sparing.report.numbers import finite
from sparing.report.page_charts import charts, left_out
from sparing.report.page_table import (
    Cell,
    depth_map,
    exact_memory,
    exact_scores,
    full_table,
    generation_tables,
    heat_map,
)
from sparing.report.printable import printable
from sparing.workbench.comparison.generation_row import GenerationRow
from sparing.workbench.comparison.headline import safe_but_slower
from sparing.workbench.comparison.judgement import KEPT
from sparing.workbench.comparison.verdict import Comparison, Row
from sparing.workbench.pages import draws

#: In this order: the table must work even if a chart does not.
_SCRIPTS = ("table", "page", "keys", "figure", "labels", "scales", "trade", "crossover", "heads")


@draws(Comparison)
def page(found: Comparison) -> str:
    """Return the page with all styles and scripts, plotly's among them; needs plotly and jinja2.

    Jinja escapes every text and the JSON; the scripts write texts as texts. Control characters are shown as escapes.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup, escape
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        name = (error.name or "plotly").partition(".")[0]
        raise ModuleNotFoundError(f"{name} is missing; run: pip install 'sparing[cli]'", name=name) from None
    environment = Environment(
        loader=PackageLoader("sparing.report", "static"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=lambda value: printable(value) if type(value) is str else value,
    )  # fmt: skip
    environment.policies["json.dumps_function"] = lambda value: json.dumps(_shown(value), allow_nan=False)
    environment.policies["json.dumps_kwargs"] = {}
    environment.filters["breakable"] = lambda spec: escape(printable(spec)).replace("(", Markup("(<wbr>"))
    titles, rows = full_table(found)
    layers, heat = heat_map(found)
    winner = found.recommended
    chosen = winner or safe_but_slower(found.generation, found.rows)
    drawn = charts(found)
    generated = [verdict_second(each) for each in generation_tables(found)]
    library = (
        get_plotlyjs() if drawn["trade"]["points"] or drawn["trade"]["oracles"] or drawn["crossover"]["lines"] else ""
    )
    return environment.get_template("page.html").render(
        found=found, charts=drawn, left_out=left_out(found), titles=titles, rows=rows, layers=layers, heat=heat,
        generation=generated, depths=depth_map(found), kept=KEPT, reasons=_reasons(found),
        winner=winner, chosen=chosen,
        code=None if chosen is None else code(chosen, found.kind),
        exact_memory=exact_memory(found), exact_scores=exact_scores(found),
        style=Markup(_static("page.css")), plotly=Markup(_inside_script(library)),
        script=Markup(_inside_script("\n".join(_static(f"{name}.js") for name in _SCRIPTS))),
    )  # fmt: skip


def _shown(value: Any) -> Any:
    """Return JSON with every text in it printable."""
    if isinstance(value, dict):
        return {_shown(name): _shown(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(part) for part in value]
    return printable(value) if isinstance(value, str) else finite(value) if isinstance(value, float) else value


def verdict_second(table: tuple[str, list[str], list[list[Cell]]]) -> tuple[str, list[str], list[list[Cell]]]:
    """Return the table with its verdict beside the method, where a phone shows it without scrolling."""
    name, titles, rows = table
    if "verdict" not in titles:
        return table
    order = [0, titles.index("verdict")]
    order += [place for place in range(len(titles)) if place not in order]
    return name, [titles[place] for place in order], [[row[place] for place in order] for row in rows]


def _reasons(found: Comparison) -> list[str]:
    """Return what the verdicts of generation follow from, where a method is not safe, refused, or one cannot tell."""
    said = [f"{row.method}, {row.when} at {row.context}: {row.reason}" for row in found.generation if row.reason]
    refused = {row.method: row.refused for row in found.generation if row.refused is not None}
    return said + [f"{method}: {why}" for method, why in refused.items()]


def code(row: Row | GenerationRow, kind: str) -> str:
    """Return code that turns a method on, as it was measured, and off again."""
    when = f', when="{row.when}"' if kind == "language model" else ""
    return (
        "import sparing\n\n"
        f"handle = sparing.approximate(model, {json.dumps(row.method)}{when})\n"
        "# ... run the model as before ...\n"
        "handle.restore()  # exact attention again\n"
    )


def _static(name: str) -> str:
    return (files("sparing.report") / "static" / name).read_text(encoding="utf-8")


def _inside_script(text: str) -> str:
    """Return code that ends no script element and opens no comment in it: in strings and patterns "\\/" is "/"."""
    return re.sub(r"<(/script|!--)", lambda match: "<\\" + match[1], text, flags=re.IGNORECASE)
