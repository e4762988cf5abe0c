"""Read WikiText-2 (Merity et al. 2016), article by article, from the file of a split."""

from __future__ import annotations

import re
from pathlib import Path

from sparing.documents import Documents, decoded

SITE = "https://huggingface.co/datasets/Salesforce/wikitext (wikitext-2-v1)"
_NAMES = ("valid.txt", "wiki.valid.tokens", "test.txt", "wiki.test.tokens", "train.txt", "wiki.train.tokens")
_TITLE = re.compile(r"^ ?= [^=\n]+ = ?$", re.MULTILINE)  # titles of sections have more than one "="


def path_in(data: Path) -> Path | None:
    """Return the first file of a split in FOLDER/wikitext2, plain or compressed, or None."""
    places = [data / "wikitext2" / f"{name}{end}" for name in _NAMES for end in ("", ".xz", ".gz")]
    return next((place for place in places if place.is_file()), None)


def read(data: Path | None, *, wanted_by: str) -> Documents:
    """Return the articles, the longest first."""
    path = None if data is None else path_in(data)
    if path is None:
        raise ValueError(
            f"data: {wanted_by} needs WikiText-2, {data or 'FOLDER'}/wikitext2/valid.txt (or .txt.xz): plain text, "
            f"each article below a line ' = Title = '; from {SITE}"
        )
    text = decoded(path)
    starts = [match.start() for match in _TITLE.finditer(text)]
    if not starts:
        raise ValueError(f"data: {path} has no article: no line is ' = Title = '")
    found = [text[start:stop].strip() for start, stop in zip(starts, [*starts[1:], len(text)], strict=True)]
    return Documents(path.name, tuple(sorted(found, key=lambda article: (-len(article), article))))
