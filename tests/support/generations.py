"""Rows of generation, made by hand."""

from sparing.workbench.comparison.facts import count_facts
from sparing.workbench.comparison.generation_row import GenerationRow, GenerationTimes
from sparing.workbench.estimate import Estimate
from sparing.workbench.retrieval.tasks import Context, Question
from sparing.workbench.timing import Interval


def facts_of(solved, kept, each=4):
    """Contexts with `each` facts that exact attention finds, of which the first ones are kept."""
    asked = [Question("", "1", number / each) for number in range(each)]
    contexts = [Context("keys", "prose", 100, seed, "", tuple(asked)) for seed in range(solved // each)]
    found = [number < kept for number in range(solved)]
    pairs = [((True,) * each, tuple(found[start : start + each])) for start in range(0, solved, each)]
    return count_facts(contexts, pairs)


def times_of(speed):
    low, high = 0.99 * speed, 1.01 * speed
    return GenerationTimes("static", speed, 1.0, Interval(speed, low, high), 1.0, 0.5, 9.0, 9.1, 1.0, 1.1, 1000, 100)


NO_CHANGE = Estimate(0.001, -0.001, 0.003, 12)


def row_of(verdict, context, speed, **options):
    given = {"change": NO_CHANGE, "facts": facts_of(80, 79), "times": times_of(speed), "differing": NO_CHANGE}
    return GenerationRow("multipole", "decode", context, verdict, **{**given, **options})
