"""Texts of a given length with facts in them, and questions about the facts, made from seeds.

In the manner of RULER (Hsieh et al. 2024): a number that must be copied from one place of a long text, where other
places look alike. Every question is a text to continue, so that models without a chat format can answer it. Its answer
is digits, which greedy decoding gives or does not give.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparing.sample_text import python_sentences, python_sources

#: What a fact is about. Names are single words, so that tasks differ in their form and not in their spelling.
NAMES = (
    "Oslo", "Lima", "Cairo", "Delhi", "Paris", "Tokyo", "Milan", "Sofia", "Quito", "Accra", "Dakar", "Hanoi", "Kabul",
    "Miami", "Osaka", "Perth", "Rabat", "Salem", "Seoul", "Tunis", "Turin", "Vaduz", "Berne", "Doha", "Minsk", "Prague",
    "Vienna", "London", "Madrid", "Lisbon", "Dublin", "Athens", "Berlin", "Warsaw", "Havana", "Nairobi", "Boston",
    "Denver", "Dallas", "Austin", "Geneva", "Zagreb", "Moscow", "Munich", "Naples", "Venice", "Krakow", "Bombay",
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """A text that a model continues after the context, and the digits that it should continue with."""

    text: str
    answer: str
    depth: float  #: place of the fact in the context, from 0 (first) to 1 (last)


@dataclass(frozen=True)
class Context:
    """A text with facts, and all questions about it, which can be asked from one cache."""

    task: str
    haystack: str
    length: int  #: tokens of the text at most
    seed: int
    text: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class _Fact:
    lines: tuple[str, ...]  #: inserted at one depth each
    questions: tuple[tuple[str, str], ...]  #: and their answers


def make_context(
    task: str, haystack: str, length: int, seed: int, count_tokens: Callable[[str], int], *, depth: float | None = None
) -> Context:
    """Return a text of at most `length` tokens with the facts of a task at random depths.

    haystack: a name of `HAYSTACKS`. count_tokens: of a text, by the model's tokenizer. depth: place of the fact, for
    tasks with one.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} is not known; tasks: {', '.join(TASKS)}")
    if haystack not in HAYSTACKS:
        raise ValueError(f"haystack={haystack!r} is not known; haystacks: {', '.join(HAYSTACKS)}")
    if depth is not None and not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth={depth!r} must be from 0 to 1")
    gen = random.Random(f"{task} {haystack} {length} {seed}")
    facts = TASKS[task](gen)
    lines = [(line, number) for number, fact in enumerate(facts) for line in fact.lines]
    room = length - sum(count_tokens(line + "\n") for line, _ in lines)
    if room < 0:
        raise ValueError(
            f"length={length} is too short for the facts of task {task!r}, which take {length - room} tokens"
        )
    hay = _fill(HAYSTACKS[haystack](gen), room, count_tokens)
    places = [depth] * len(lines) if depth is not None else _spread(gen, facts)
    order = sorted(range(len(lines)), key=lambda i: (places[i], i))
    out, used = [], 0
    for i in order:
        until = round(places[i] * len(hay))
        out += [*hay[used:until], lines[i][0]]
        used = max(used, until)
    text = "\n".join([*out, *hay[used:]]) + "\n"
    first = {number: place for place, (_, number) in sorted(zip(places, lines, strict=True), reverse=True)}
    asked = [(number, question) for number, fact in enumerate(facts) for question in fact.questions]
    return Context(
        task, haystack, length, seed, text, tuple(Question(text, answer, first[i]) for i, (text, answer) in asked)
    )


def _fill(pieces: Sequence[str], room: int, count_tokens: Callable[[str], int]) -> list[str]:
    """Return as many of the pieces, again from the first where they run out, as fit into `room` tokens."""
    found: list[str] = []
    while pieces:
        for piece in pieces:
            room -= count_tokens(piece + "\n")
            if room < 0:
                return found
            found.append(piece)
    return found


def _spread(gen: random.Random, facts: Sequence[_Fact]) -> list[float]:
    """Return a depth for every line: one in each of as many equal parts of the text, the lines of a fact in order."""
    count = sum(len(fact.lines) for fact in facts)
    places = [(i + gen.random()) / count for i in range(count)]
    gen.shuffle(places)
    found, used = [], 0
    for fact in facts:
        found += sorted(places[used : used + len(fact.lines)])
        used += len(fact.lines)
    return found


# Haystacks: lines of text, in an order that depends on the seed.


def _prose(gen: random.Random) -> list[str]:
    """Paragraphs of two sentences, from a random start."""
    sentences = python_sentences()
    start = gen.randrange(len(sentences))
    turned = sentences[start:] + sentences[:start]
    return [" ".join(turned[i : i + 2]) for i in range(0, len(turned), 2)]


def _repeated(gen: random.Random) -> list[str]:
    return ["The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."]


def _code(gen: random.Random) -> list[str]:
    """Top-level definitions of modules, from a random start."""
    source = gen.choice(python_sources()).split("\n")
    starts = [i for i, line in enumerate(source) if line[:4] in ("def ", "clas")]
    pieces = ["\n".join(source[a:b]).rstrip() for a, b in zip(starts, [*starts[1:], len(source)], strict=True)]
    start = gen.randrange(len(pieces))
    return [line for piece in pieces[start:] + pieces[:start] for line in _short(piece)]


def _short(piece: str) -> list[str]:
    """Cut a definition into parts of at most 10 lines."""
    lines = piece.split("\n")
    return ["\n".join(lines[i : i + 10]) for i in range(0, len(lines), 10)]


HAYSTACKS: dict[str, Callable[[random.Random], list[str]]] = {"prose": _prose, "repeated": _repeated, "code": _code}


# Tasks: facts that look alike, with other names and other numbers.


def _number(gen: random.Random) -> str:
    return str(gen.randrange(10_000, 100_000))


def _needles(gen: random.Random, count: int) -> list[_Fact]:
    return [
        _Fact((f"The special number of {name} is {value}.",), ((f"\nThe special number of {name} is", f" {value}"),))
        for name, value in ((name, _number(gen)) for name in gen.sample(NAMES, count))
    ]


def _values(gen: random.Random) -> list[_Fact]:
    """Two names with three numbers each; a question asks for the number with the colour that it names."""
    found = []
    for name in gen.sample(NAMES, 2):
        for colour in ("red", "blue", "green"):
            value = _number(gen)
            line = f"In {name}, the {colour} number is {value}."
            found.append(_Fact((line,), ((f"\nIn {name}, the {colour} number is", f" {value}"),)))
    return found


def _chain(gen: random.Random) -> list[_Fact]:
    """Two chains of two variables; the second is said to equal the first, whose value is to be found."""
    names, found = gen.sample(NAMES, 4), []
    for a, b in (names[:2], names[2:]):
        value = _number(gen)
        lines = (f"The code of {a} is {value}.", f"The code of {b} is the same as that of {a}.")
        asked = f"\nThe code of {b} is the same as that of {a}. So the code of {b} is"
        found.append(_Fact(lines, ((asked, f" {value}"),)))
    return found


def _table(gen: random.Random) -> list[_Fact]:
    """One table of 16 rows at one place; four of them are asked for."""
    names, values = gen.sample(NAMES, 16), [_number(gen) for _ in range(16)]
    rows = [f"| {name} | {value} |" for name, value in zip(names, values, strict=True)]
    whole = "\n".join(["| city | code |", "|---|---|", *rows])
    asked = gen.sample(range(16), 4)
    questions = [(f"\nThe row of {names[i]} in the table again:\n| {names[i]} |", f" {values[i]}") for i in asked]
    return [_Fact((whole,), tuple(questions))]


def _definitions(gen: random.Random) -> list[_Fact]:
    """Six functions with a default argument each; a question calls one."""
    found = []
    for name in gen.sample(NAMES, 6):
        value, function = _number(gen), f"connect_{name.lower()}"
        line = f"def {function}(host, port={value}):\n    return Connection(host, port)\n"
        found.append(_Fact((line,), ((f"\ndef {function}(host, port=", value),)))
    return found


TASKS: dict[str, Callable[[random.Random], list[_Fact]]] = {
    "needle": lambda gen: _needles(gen, 1),
    "keys": lambda gen: _needles(gen, 8),
    "values": _values,
    "chain": _chain,
    "table": _table,
    "code": _definitions,
}
