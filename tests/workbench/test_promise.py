"""What a plan promises, and how often it may be wrong: bounds, calibration, the check, the path."""

import itertools
import math
import random

import pytest
from scipy import stats

from sparing.workbench.binomial import at_most, upper_bound
from sparing.workbench.planning.damage import damages, groups
from sparing.workbench.planning.path import path
from sparing.workbench.planning.promise import Promise, calibrating
from sparing.workbench.planning.search import check, farthest, figures


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
@pytest.mark.parametrize("count", [1, 7, 29, 60, 400])
def test_the_bound_is_clopper_and_pearsons(count, confidence):
    for seen in {0, 1, count // 3, count - 1, count}:
        wanted = stats.beta.ppf(confidence, seen + 1, count - seen) if seen < count else 1.0
        assert upper_bound(seen, count, confidence) == pytest.approx(wanted, rel=1e-9)
        other = stats.binomtest(seen, count, alternative="less").proportion_ci(confidence, "exact").high
        assert upper_bound(seen, count, confidence) == pytest.approx(other, rel=1e-9)


def test_binomial_probabilities():
    for seen, count, rate in [(0, 5, 0.3), (3, 47, 0.1), (200, 400, 0.45), (2, 2, 0.7), (1, 5, 0.0), (1, 5, 1.0)]:
        assert at_most(seen, count, rate) == pytest.approx(stats.binom.cdf(seen, count, rate), rel=1e-9)


def test_too_few_documents_are_told_how_many_it_takes():
    promise = Promise(0.02)
    assert (calibrating(43), 43 - calibrating(43)) == (14, 29)
    promise.refuse_few(43)
    assert promise.kept([0.0] * 29)
    assert not promise.kept([0.0] * 28)
    with pytest.raises(
        ValueError,
        match=r"documents: 42 are too few for coverage=0.9 with confidence=0.95: that takes 43, 29 of them held out; coverage=0.898 is the most",
    ):
        promise.refuse_few(42)
    with pytest.raises(ValueError, match=r"documents: 1 are too few .* that takes 43, 29 of them held out$"):
        promise.refuse_few(1)
    with pytest.raises(ValueError, match="4493598535"):  # at once
        Promise(0.02, coverage=1 - 1e-9).refuse_few(60)


def test_a_change_that_is_nan_is_a_violation():
    promise = Promise(0.02)
    assert promise.violations([0.02, -0.02, 0.021, -0.021, math.nan, math.inf]) == 4
    assert not promise.likely([0.001] * 20 + [math.nan], 40)
    assert promise.likely([0.001] * 20, 40)
    assert math.isnan(figures(1, [0.1, math.nan, 0.2], promise).worst)


def test_calibration_asks_for_room():
    """All changes within the tolerance are not enough where they scatter: of 40 others some would be beyond."""
    promise = Promise(0.02)
    assert promise.likely([0.004 * 1.2**i for i in range(5)] * 4, 40)
    assert not promise.likely([0.012 * 1.1**i for i in range(5)] * 4, 40)
    assert not promise.likely([0.0] * 17 + [0.03], 40), "one violation of 18 is too many"


# The statistics of the promise. Populations: changes grow along the path by documents' own factors, and a share of
# documents is fragile: they are beyond the tolerance from some step on. Calibration often sees none of these.

STEPS = 12


def population(number):
    """The first step that breaks fragile documents, and how to draw a document."""
    draw = random.Random(number)
    share, first = draw.uniform(0.101, 0.12), draw.randint(1, STEPS)

    def document():
        factor, fragile = math.exp(draw.gauss(0, 0.3)), draw.random() < share
        return [1.0 if fragile and step >= first else 2e-4 * factor * step for step in range(STEPS + 1)]

    return first, document


def misses(choose):
    """In 600 populations: how often a step comes back that breaks more than the allowed tenth, and how often any does."""
    wrong = some = 0
    for number in range(600):
        first, document = population(number)
        step = choose([document() for _ in range(43)])
        wrong, some = wrong + (step >= first), some + (step > 0)
    return wrong, some


def chosen(documents, promise):
    rows = documents[:14]
    return farthest(STEPS, lambda step: [row[step] for row in rows], promise, 29)


@pytest.mark.statistical
def test_recipes_that_break_the_promise_are_as_rare_as_it_says():
    """Null: a plan's recipe is beyond 1 - coverage with probability 0.05 at most. Statistic: such recipes in 600
    populations. False-alarm rate 1e-6. Control: without the check, the same assertion fails."""
    promise = Promise(0.02)
    limit = stats.binom.isf(1e-6, 600, 0.05)

    def planned(documents):
        return check(chosen(documents, promise), lambda step: [row[step] for row in documents[14:]], promise)[0]

    wrong, some = misses(planned)
    assert wrong <= limit
    assert some > 200, "and it does not just refuse"
    assert misses(lambda documents: chosen(documents, promise))[0] > limit, "control: calibration alone"


@pytest.mark.statistical
def test_two_steps_are_checked_at_the_level_of_one():
    """Null: the check lets a step pass that breaks a share of 0.1 or more with probability 0.05 at most, though it may
    test two. Statistic: passes in 2000 checks of two steps that do, independently. False-alarm rate 1e-6. Control:
    trying the far step first and the safe one after it is two chances, and fails."""
    promise, limit = Promise(0.02), stats.binom.isf(1e-6, 2000, 0.05)
    draw = random.Random(0)

    def changes(step):
        return [float(draw.random() < 0.1) for _ in range(29)]

    assert sum(check(8, changes, promise)[0] > 0 for _ in range(2000)) <= limit
    either = sum(promise.kept(changes(8)) or promise.kept(changes(4)) for _ in range(2000))
    assert either > limit


def test_the_safer_step_is_taken_where_the_chosen_one_fails():
    promise = Promise(0.02)
    held, found = check(8, lambda step: [0.001 if step < 8 else 0.03] * 29, promise)
    assert (held, [one.step for one in found], [one.violations for one in found]) == (4, [4, 8], [0, 29])
    held, found = check(8, lambda step: [0.03] * 29, promise)
    assert (held, [one.step for one in found]) == (0, [4])
    assert check(1, lambda step: [0.0] * 29, promise)[0] == 1


def test_bisection_finds_the_last_step_with_room():
    promise, asked = Promise(0.02), []

    def changes(step):
        asked.append(step)
        return [0.001 if step <= 17 else 0.5] * 20

    assert farthest(40, changes, promise, 40) == 17
    assert len(asked) <= 6
    assert farthest(0, changes, promise, 40) == 0


# The path


def test_a_path_changes_one_layer_at_a_time_and_never_back():
    draw = random.Random(3)
    savings = {"a": 0.2, "b": 0.5, "c": 0.6, "d": 0.9}
    damages = {f"layer {i}": {spec: draw.random() * saving for spec, saving in savings.items()} for i in range(6)}
    damages["layer 2"]["d"] = math.nan
    damages["layer 4"] = {}
    steps = path(damages, savings)
    assert steps[0] == {}
    for before, after in itertools.pairwise(steps):
        (changed,) = [layer for layer in after if after[layer] != before.get(layer)]
        assert set(before) <= set(after)
        assert savings[after[changed]] > savings.get(before.get(changed), 0.0)
    assert steps[-1] == {f"layer {i}": "c" if i == 2 else "d" for i in (0, 1, 2, 3, 5)} | {}


def test_a_path_takes_cheap_damage_first_and_leaves_out_what_is_never_worth_it():
    savings = {"mild": 0.3, "poor": 0.4, "fast": 0.6}
    damages = {"x": {"mild": 0.01, "poor": 0.9, "fast": 0.1}, "y": {"mild": 0.5, "poor": 0.6, "fast": 0.7}}
    assert path(damages, savings) == [
        {}, {"x": "mild"}, {"x": "fast"}, {"x": "fast", "y": "fast"},
    ]  # fmt: skip
    assert path(damages, savings, limit=0.05) == [{}, {"x": "mild"}]
    assert path(damages, savings, limit=0.001) == [{}]


def test_deep_models_are_probed_in_groups():
    assert groups(list("abcdef"), 12) == [[x] for x in "abcdef"]
    assert [len(x) for x in groups(list(range(30)), 12)] == [3] * 10


@pytest.mark.parametrize("depth", [6, 30])
def test_damages_are_those_of_single_layers(depth):
    """Where they add up and methods differ by a factor; in groups, too, a fragile layer stands out among its neighbours."""
    draw, asked = random.Random(0), []
    fragility = {f"layer {i}": draw.uniform(0.1, 1.0) * (50 if i == 4 else 1) for i in range(depth)}
    harm, savings = {"mild": 0.001, "rough": 0.004, "odd": 0.002}, {"mild": 0.2, "rough": 0.6, "odd": 0.3}
    can = {name: ["mild", "rough"] + ["odd"] * (i % 2) for i, name in enumerate(fragility)}

    def probe(recipes):
        asked.extend(recipes)
        return [
            [factor * sum(harm[s] * fragility[n] for n, s in layers.items()) for factor in (0.5, 1.5)]
            for layers in recipes
        ]

    found = damages(can, savings, probe)
    assert {name: sorted(each) for name, each in found.items()} == {name: sorted(each) for name, each in can.items()}
    for name, each in found.items():
        for spec, damage in each.items():
            assert damage == pytest.approx(harm[spec] * fragility[name])
    singles = sum(map(len, can.values()))
    assert len(asked) == singles if depth == 6 else len(asked) < singles - 10


def test_layers_that_do_nothing_share_nothing():
    can = {f"layer {i}": ["window"] for i in range(30)}
    assert damages(can, {"window": 0.5}, lambda asked: [[0.0]] * len(asked))["layer 3"] == {"window": 0.0}
    gone = damages(can, {"window": 0.5}, lambda asked: [[math.nan]] * len(asked))
    assert math.isnan(gone["layer 3"]["window"])
