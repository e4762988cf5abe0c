"""Return English text and source code that come with every Python, so that nothing need be downloaded."""

from __future__ import annotations

import re
import sysconfig
from importlib import import_module
from inspect import getsource
from pathlib import Path


def python_topics() -> list[str]:
    """Return the help topics of the Python documentation, longest first: about 460 kB of prose and code."""
    from pydoc_data.topics import topics

    return sorted(topics.values(), key=lambda text: (-len(text), text))


def distinct_topics() -> list[str]:
    """Return the topics that are not part of a longer one: text that is held out was not seen under another name."""
    found: list[str] = []
    for text in python_topics():
        if not any(text.strip() in longer for longer in found):
            found.append(text)
    return found


def python_sentences() -> list[str]:
    """Return sentences of prose of 6 to 30 words from the help topics, in their order."""
    found = []
    for text in python_topics():
        for paragraph in re.split(r"\n\s*\n", text):
            if re.search(r"^ {4,}|>>>|::", paragraph, re.MULTILINE):
                continue  # code and grammar
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
                if 6 <= len(sentence.split()) <= 30 and sentence[0].isupper() and sentence[-1] in ".!?":
                    found.append(sentence)
    return found


def python_sources() -> list[str]:
    """Return the source of modules of the standard library, 30 kB and more each."""
    names = ("argparse", "ast", "difflib", "doctest", "inspect", "pdb", "pickle", "tarfile", "typing", "zipfile")
    found = [getsource(import_module(name)) for name in names]
    return [text for text in found if len(text) > 30_000]


def python_modules() -> list[str]:
    """Return the source of all single-file modules of the standard library, by name: about 5 MB."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py"))]
