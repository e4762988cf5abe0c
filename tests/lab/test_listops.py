import itertools
from collections import Counter
from random import Random

import pytest

from sparing_lab.tasks.listops import OPERATORS, WORDS, examples, expression, numbers, value


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("[MIN 3 1 2 ]", 1),
        ("[MAX 3 1 2 ]", 3),
        ("[MED 3 1 2 ]", 2),
        ("[MED 3 8 ]", 5),
        ("[SM 7 8 9 ]", 4),
        ("[MAX 2 [SM 4 5 ] [MIN 9 [MED 1 1 9 ] ] 0 ]", 9),
    ],
)
def test_values_by_hand(text, answer):
    assert value(text.split()) == answer


def test_lists_keep_to_their_rules():
    for words in itertools.islice(examples(0, least=50, most=120), 40):
        assert 50 <= len(words) <= 120
        assert set(words) <= set(WORDS)
        depth = deepest = 0
        counts = []
        for word in words:
            if word == "]":
                assert 2 <= counts.pop() <= 10
                depth -= 1
            else:
                if counts:
                    counts[-1] += 1
                if word.startswith("["):
                    depth += 1
                    counts.append(0)
            deepest = max(deepest, depth)
        assert depth == 0
        assert deepest <= 9  # the tenth level has digits only
        assert 0 <= value(words) <= 9


def test_long_lists_have_the_length_of_the_arena():
    lengths = [len(words) for words in itertools.islice(examples(1), 5)]
    assert all(500 <= length <= 2000 for length in lengths)


def test_the_same_seed_gives_the_same_lists():
    def some(seed):
        return list(itertools.islice(examples(seed, least=10, most=60), 5))

    assert some("train 0") == some("train 0")
    assert some("train 0") != some("valid 0")


def test_the_last_level_has_digits_only():
    found = [expression(Random(seed), depth=2) for seed in range(200)]
    assert all(sum(word.startswith("[") for word in words) == 1 for words in found)
    assert any("[MIN" in words[1:] for words in (expression(Random(seed), depth=3) for seed in range(200)))


def test_operators_and_digits_are_drawn_evenly():
    # 4 counts of about 2,500 each, 10 of 7,500: 6 standard deviations are passed with a probability below 1e-7.
    random = Random(0)
    words = [word for _ in range(3000) if (found := expression(random, depth=3)) for word in found if word != "]"]
    count = Counter(words)
    for kinds in ([f"[{name}" for name in OPERATORS], [str(digit) for digit in range(10)]):
        total = sum(count[kind] for kind in kinds)
        mean = total / len(kinds)
        assert all(abs(count[kind] - mean) < 6 * mean**0.5 for kind in kinds)


def test_numbers_begin_after_the_padding():
    assert numbers(["[MAX", "0", "9", "]"]) == [12, 1, 10, 15]
    assert 0 not in numbers(next(examples(2, least=20, most=40)))


@pytest.mark.parametrize("text", ["1 2", "[MIN 1 2", "1 ]", "[MIN ]", "[AVG 1 2 ]"])
def test_what_is_no_list_has_no_value(text):
    with pytest.raises(ValueError, match="words"):
        value(text.split())


@pytest.mark.parametrize(
    "options", [{"least": 3}, {"least": 50, "most": 40}, {"depth": 1}, {"arguments": 1}, {"depth": 2, "least": 500}]
)
def test_impossible_lists_are_refused(options):
    with pytest.raises(ValueError, match=r"least|depth"):
        next(examples(0, **options))
