"""English text that every Python has."""

from __future__ import annotations


def python_topics() -> list[str]:
    """The help topics of the Python documentation, longest first: about 460 kB of English prose and code."""
    from pydoc_data.topics import topics

    return sorted(topics.values(), key=lambda text: (-len(text), text))
