"""Text from outside as a terminal may show it.

Names of files, models, layers and documents, and everything in a JSON file, may hold characters that move the cursor,
colour the screen, set its title or reverse the order of what is read. Whatever the commands print passes through
`printable`: tables and lines by `sparing.report.terminal.Terminal`, errors in `sparing.cli.main`.
"""

from __future__ import annotations

import unicodedata

#: Controls, invisible formats (bidirectional overrides are among them), lone surrogates, line and paragraph separators.
_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")
_KEPT = "\n\t\u200c\u200d"  # scripts of India and Iran, and emoji, are written with the two joiners


def printable(text: str) -> str:
    r"""Write characters that a terminal would obey, or would not show, as Python's escapes; keep all others.

    >>> print(printable("caf\u00e9 \x1b[31mred \u202eden"))
    café \x1b[31mred \u202eden
    """
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


def one_line(text: str) -> str:
    r"""Return printable text without line breaks.

    >>> print(one_line("not found:\n\n  try\x07 again"))
    not found: try\x07 again
    """
    return printable(" ".join(line.strip() for line in text.split("\n") if line.strip()))


def _shown(char: str) -> str:
    safe = char in _KEPT or unicodedata.category(char) not in _UNSAFE
    return char if safe else char.encode("unicode_escape").decode("ascii")
