"""ListOps as in the Long Range Arena: nested lists of digits, and their values.

`[MAX 2 9 [MIN 4 7 ] 0 ]` is 9. This generator follows the rules of Nangia and Bowman (2018) and Tay et al. (2021):
minimum, maximum, median and sum modulo ten, each of two to ten arguments, on ten levels, the last of digits only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

OPERATORS = ("MIN", "MAX", "MED", "SM")
WORDS = ("<pad>", *(str(digit) for digit in range(10)), *(f"[{name}" for name in OPERATORS), "]")  #: by token
CHANCE = 0.1  #: for ten answers; they are not quite equally frequent
_NESTED = 0.25  # probability that an argument is a list
_NUMBERS = {word: number for number, word in enumerate(WORDS)}


def expression(random: Random, *, depth: int = 10, arguments: int = 10, most: int = 2000) -> list[str] | None:
    """Return the words of a random list, or None if it has more than `most`."""
    words: list[str] = []

    def add(level: int) -> bool:
        if level > 1 and (level >= depth or random.random() >= _NESTED):
            words.append(str(random.randrange(10)))
            return len(words) <= most
        words.append(f"[{random.choice(OPERATORS)}")
        whole = all(add(level + 1) for _ in range(random.randint(2, arguments)))
        words.append("]")
        return whole and len(words) <= most

    return words if add(1) else None


def examples(
    seed: int | str, *, least: int = 500, most: int = 2000, depth: int = 10, arguments: int = 10
) -> Iterator[list[str]]:
    """Yield lists of `least` to `most` words without end, the same for the same seed."""
    if not 4 <= least <= most:
        raise ValueError(f"least={least}, most={most}: least must be at least 4, and at most `most`")
    if depth < 2 or arguments < 2:
        raise ValueError(f"depth={depth} must be at least 2, arguments={arguments} at least 2")
    if least > arguments ** min(depth - 1, 8):
        raise ValueError(f"least={least} is more than lists of depth={depth}, arguments={arguments} can have")
    random = Random(f"listops {seed}")
    while True:
        found = expression(random, depth=depth, arguments=arguments, most=most)
        if found is not None and len(found) >= least:
            yield found


def value(words: Sequence[str]) -> int:
    """Return the value of a list.

    >>> value("[MAX 2 9 [MIN 4 7 ] 0 ]".split())
    9
    """
    open_lists: list[list[int]] = [[]]
    names: list[str] = []
    for word in words:
        if word.startswith("["):
            names.append(word[1:])
            open_lists.append([])
        elif word == "]":
            if not names:
                raise ValueError("words: a list ends that has not begun")
            done = open_lists.pop()
            open_lists[-1].append(_apply(names.pop(), done))
        else:
            open_lists[-1].append(int(word))
    if names or len(open_lists[0]) != 1:
        raise ValueError("words: not exactly one complete list")
    return open_lists[0][0]


def _apply(name: str, numbers: list[int]) -> int:
    if not numbers:
        raise ValueError(f"words: [{name} has no arguments")
    if name == "MIN":
        return min(numbers)
    if name == "MAX":
        return max(numbers)
    if name == "SM":
        return sum(numbers) % 10
    if name != "MED":
        raise ValueError(f"words: there is no operator {name!r}")
    ordered, middle = sorted(numbers), len(numbers) // 2
    return ordered[middle] if len(numbers) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


def numbers(words: Sequence[str]) -> list[int]:
    """Return the tokens of the words: their positions in `WORDS`."""
    return [_NUMBERS[word] for word in words]
