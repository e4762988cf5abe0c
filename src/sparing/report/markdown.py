"""The capability table of `docs/methods.md`: `python -m sparing.report.markdown > docs/methods.md`."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields

from sparing.contract import Method, Supports, list_methods

_HEAD = """# Methods

What each method is, and what it can do. This page is generated from the code; `attention()` enforces the same table.

**causal**: `is_causal=True` without a leak. **padding**: boolean masks `[B, 1, 1, n_k]`. **mask**: masks that differ
by query (boolean, or any: additive too). **cross**: n_q != n_k; "rows mix" where a row depends on other queries too, so
that the cross attention of a decoder would see later tokens. **gqa**: fewer key heads than query heads.
**gradient**: for all inputs, for the values only, or none. **lse**: `inspect()` returns the log-sum-exp. **decode**:
`sparing.Index` continues a cache. **seeded**: the result depends on `seed`. **training-free**: meant for weights that
were trained with softmax attention. An *oracle* needs the exact result: it shows what is possible at a budget and is
not a product.
"""


def _first_line(method: type[Method]) -> str:
    return (inspect.getdoc(method) or "").splitlines()[0].rstrip(".")


def capability_table() -> str:
    """Return a Markdown table with a row for each method, from what the classes declare."""
    columns = [
        "method",
        "budget",
        "target",
        "causal",
        "padding",
        "mask",
        "cross",
        "gqa",
        "gradient",
        "lse",
        "decode",
        "seeded",
    ]
    lines = ["| " + " | ".join([*columns, "training-free"]) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, method in list_methods().items():
        can = method.supports
        parts = [
            f"`{name}`" + (" (oracle)" if method.oracle else ""), f"`{method.budget}`" if method.budget else "-",
            method.target, _yes(can.causal), _yes(can.key_padding), can.attn_mask or "-", _cross(can),
            _yes(can.gqa), can.gradient or "-", _yes(can.lse), _yes(can.decode), _yes(can.stochastic),
            _yes(can.training_free),
        ]  # fmt: skip
        lines.append("| " + " | ".join(parts) + " |")
    return "\n".join(lines)


def page() -> str:
    """Return the whole page."""
    parts = [_HEAD, capability_table(), ""]
    for name, method in list_methods().items():
        defaults = ", ".join(f"{f.name}={f.default!r}" for f in fields(method))
        parts += [f"## `{name}({defaults})`" if defaults else f"## `{name}`", "", _body(method), ""]
    return "\n".join(parts)


def _body(method: type[Method]) -> str:
    """Return a docstring as Markdown: its first line as prose, the rest as in the code."""
    rest = (inspect.getdoc(method) or "").split("\n", 1)[1:]
    return f"{_first_line(method)}.\n\n```text\n{rest[0].strip() if rest else ''}\n```"


def _cross(can: Supports) -> str:
    return "rows mix" if can.cross_attention and can.mixes_queries else _yes(can.cross_attention)


def _yes(claimed: object) -> str:
    return "yes" if claimed else "-"


if __name__ == "__main__":
    sys.stdout.write(page())
