"""Each criterion by itself: figures that meet it, and figures that must fail it."""

import pytest

from sparing_lab.studies.judges import (
    Criterion,
    Judge,
    NotRun,
    above,
    ahead,
    at_least,
    at_most,
    below,
    close,
    described,
    each,
    exponent,
    falls,
    listed,
    near,
    rises,
    within,
)

HASHES = (8, 16, 32)
ROOT = {m: m**-0.5 for m in HASHES}
FLAT = dict.fromkeys(HASHES, 1.0)

CRITERIA = [
    # criterion, its words, figures that meet it, figures that must fail it
    (below(1), "below 1", {"a": 0.9, "b": -3}, {"a": 0.9, "b": 1}),
    (at_most(1), "at most 1", {"a": 1, "b": 0}, {"a": 1.001, "b": 0}),
    (at_most(2, " points"), "at most 2 points", 2, 3),
    (above(1), "above 1", [1.1, 2], [1, 2]),
    (at_least(0.5), "at least 0.5", [0.5], [0.49]),
    (within(-0.55, -0.45), "-0.55 to -0.45", {"a": -0.55}, {"a": -0.56}),
    (within(-0.55, -0.45), "-0.55 to -0.45", {"a": -0.45}, {"a": -0.5, "b": 0.5}),
    (near({"a": 10, "b": 1}, 0.2), "within 20% of the paper's", {"a": 12, "b": 0.8}, {"a": 12, "b": 0.7}),
    (near(10, 0.2), "within 20% of the paper's", {"a": 8}, {"a": 12.1}),
    (close({"a": 1.0}, 0.1), "within 0.1 of the paper's", {"a": 0.95}, {"a": 1.11}),
    (close(1.0, 0.1), "within 0.1 of the paper's", {"a": 1.05}, {"a": 0.8}),
    (falls(), "falls at each step", ROOT, FLAT),
    (falls("the hashes"), "falls at each step of the hashes", {"a": ROOT, "b": [3, 2, 1]}, {"a": ROOT, "b": [3, 1, 2]}),
    (falls(room=0.1), "falls at each step (up to 0.1 of noise)", [3, 3.1, 2], [3, 3.2, 2]),
    (rises(), "rises at each step", [1, 2, 3], [1, 2, 2]),
    (rises(room=0.1), "rises at each step (up to 0.1 of noise)", [1, 0.9, 2], [1, 0.8, 2]),
    (exponent(-0.6, -0.4), "as a power of -0.6 to -0.4", {"a": ROOT, "b": ROOT}, {"a": ROOT, "b": FLAT}),
    (exponent(-0.6, -0.4), "as a power of -0.6 to -0.4", ROOT, {m: 1 / m for m in HASHES}),
    (ahead("a"), "a below all others", {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "c": 1}),
    (ahead("a", of=["b"]), "a below b", {"a": 1, "b": 2, "c": 0}, {"a": 3, "b": 2, "c": 4}),
    (ahead("a", at=16), "a below all others at 16", {"a": ROOT, "b": FLAT}, {"a": FLAT, "b": ROOT}),
    (ahead("a", by=1), "a below all others by more than 1", {"a": 1, "b": 2.5}, {"a": 1, "b": 2}),
    (ahead("a", higher=True), "a above all others", {"a": 3, "b": 2}, {"a": 2, "b": 3}),
    (below(1).once("in one model"), "below 1 in one model", {"a": 0.9, "b": 2}, {"a": 1, "b": 2}),
    (below(1).mostly(), "below 1 for most", [0, 0, 2], [0, 2]),
    (below(1).in_share(0.75, "at three quarters"), "below 1 at three quarters", [0, 0, 0, 2], [0, 0, 2, 2]),
    (below(1).on_average(), "below 1 on average", {"a": 0, "b": 1.9}, {"a": 0, "b": 2}),
    (below(1).of("mean"), "below 1", {"mean": 0, "high": 2}, {"mean": 2, "high": 0}),
    (below(1) & above(0), "below 1, and above 0", [0.5], [0]),
    (below(1) & above(0), "below 1, and above 0", [0.5], [1]),
    (each("even", lambda value: value % 2 == 0), "even", [2, 4], [2, 3]),
]  # fmt: skip


@pytest.mark.parametrize(("criterion", "words", "good", "bad"), CRITERIA)
def test_a_criterion_says_what_it_takes_and_fails_what_does_not_meet_it(criterion, words, good, bad):
    assert criterion.words == words
    assert criterion.holds(good) is True
    assert criterion.holds(bad) is False


def test_a_criterion_about_all_figures_together_cannot_be_counted():
    with pytest.raises(TypeError, match="'falls at each step' is about all figures together"):
        falls().once()


def judge(**options):
    return Judge(lambda rows: {row["name"]: row["y"] for row in rows}, below(1), below(2), **options)


@pytest.mark.parametrize(("y", "verdict"), [(0.5, "reproduces"), (1.5, "same shape"), (2.5, "does not")])
def test_a_judge_gives_the_verdict_and_the_figures(y, verdict):
    found = judge()([{"name": "a", "y": 0.0}, {"name": "b", "y": y}])
    assert (found.verdict, found.ours) == (verdict, f"a 0, b {y:g}")


def test_without_a_shape_there_is_no_same_shape():
    strict = Judge(lambda rows: [row["y"] for row in rows], below(1), shows=lambda found: f"{max(found)} at most")
    assert strict([{"y": 1.5}]).verdict == "does not"
    assert strict([{"y": 1.5}]).ours == "1.5 at most"
    assert strict.criterion == "below 1"


def test_a_judge_states_its_criterion():
    assert judge(of="error, every length").criterion == "error, every length: below 1; same shape: below 2"


def test_what_the_criterion_said_already_is_not_said_again():
    counted = Judge(lambda rows: rows, below(1), below(1).once("in one model"))
    assert counted.criterion == "below 1; same shape: in one model"
    assert Judge(lambda rows: rows, at_most(2), at_most(20)).criterion == "at most 2; same shape: at most 20"


def test_what_is_missing_is_not_judged():
    def refuse(rows):
        raise NotRun("needs two tasks")

    found = Judge(refuse, below(1))([])
    assert (found.verdict, found.ours) == ("not run", "needs two tasks")
    found = judge(needs="no model has both")([])
    assert (found.verdict, found.ours) == ("not run", "no model has both")


def test_figures_are_listed_by_a_form():
    assert listed({("a", 1): (0.5, 2)}, "{key[0]} {value[0]:.0%}") == "a 50%"
    assert listed({"a": 1, "b": 2}, "{key}{value}", "; ") == "a1; b2"


def test_figures_are_described_by_their_names_and_curves_by_their_ends():
    assert described({"a": 0.12345, "b": 2}) == "a 0.123, b 2"
    assert described(ROOT) == "0.354 at 8, 0.177 at 32"
    assert described({"a": ROOT, "b": {"x": 1.0, "y": 2.0}}) == "a 0.354 at 8, 0.177 at 32; b x 1 / y 2"
    assert described([0.5, "none"]) == "0.5 / none"


def test_criteria_of_ones_own_are_words_and_a_condition():
    own = Criterion("the first is the largest", lambda found: found[0] == max(found))
    assert own.holds([3, 1])
    assert not own.holds([1, 3])
