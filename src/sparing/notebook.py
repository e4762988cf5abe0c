"""HTML with which notebooks show a result: a title, sentences, a table. Every text is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence


def block(title: str, *sentences: str) -> str:
    """Return a title in bold, and a paragraph for each sentence.

    >>> block("Keep <exact>", "One.")
    '<p><b>Keep &lt;exact&gt;</b></p><p>One.</p>'
    """
    return f"<p><b>{text(title)}</b></p>" + "".join(f"<p>{text(each)}</p>" for each in sentences)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, or nothing without rows.

    >>> table(["layer"], [["0"]])
    '<table><thead><tr><th>layer</th></tr></thead><tbody><tr><td>0</td></tr></tbody></table>'
    """
    if not rows:
        return ""
    head = "".join(f"<th>{text(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def text(value: str) -> str:
    """Escape markup, and replace characters that cannot be shown."""
    return html.escape("".join(char if char.isprintable() or char == "\n" else "?" for char in value))
