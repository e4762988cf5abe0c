"""A comparison made by hand: every verdict, every kind of gap."""

import base64
import math

from sparing.workbench.comparison.judgement import FASTER, ORACLE, REFUSED, SLOWER, UNSAFE
from sparing.workbench.comparison.maps import HeadMap
from sparing.workbench.comparison.quality import LayerError
from sparing.workbench.comparison.races import RacePoint
from sparing.workbench.comparison.seconds import Seconds
from sparing.workbench.comparison.verdict import Comparison, Row
from sparing.workbench.estimate import Estimate
from sparing.workbench.timing import Interval

LAYERS = [f"encoder.layer.{i}.attention.self" for i in range(3)]
REASON = "encoder.layer.0 cannot run nystrom(landmarks=64): it is causal"
FAST, SLOW, BAD = "window(size=64, sinks=1)", "key_clusters(clusters=64, keys=76, window=16)", "lsh(rounds=4, chunk=32)"


def around(middle):
    return Interval(middle, 0.9 * middle, 1.1 * middle)


def by_layer(error):
    return tuple(
        LayerError(name, 0.0, error, error * (1 + i), (error, math.nan, 2 * error)) for i, name in enumerate(LAYERS)
    )


def measured(method, verdict, change, speed, /, **options):
    """A row as `compare` gives it; speed: of the model."""
    error = 5 * change
    given = {
        "change": Estimate(change, change / 2, change * 1.5, 4),
        "error": Estimate(error, error / 2, error * 1.5, 4),
        "substitution": 0.0,
        "approximation": error,
        "layers": by_layer(error),
        "keys_read": 66.0,
        "flops_reduction": 4.0,
        "time": Seconds(around(1.5 * speed), around(speed), 0.05, 12_345_678, 14_000_000, around(speed)),
        "points": tuple(RacePoint(length, around(speed * length / 1024)) for length in (256, 512, 1024, 2048)),
        "crossover": round(1024 / speed),
    }
    return Row(method, verdict, **{**given, **options})


def maps(methods, heads=((1, 0), (2, 2)), side=4):
    """Each picture is flat, and differs from all others."""
    return tuple(
        HeadMap(LAYERS[number], number, head, method, side, base64.b64encode(bytes([grey] * side**2)).decode())
        for i, method in enumerate(methods)
        for number, head in heads
        for grey in [200 - (40 * i + 20 * number) * (i > 0)]
    )


def example(**options):
    """Six rows: safe and faster, safe and slower, not safe, without numbers, an oracle, refused."""
    nothing = Estimate(math.nan, None, None, 4)
    rows = (
        measured(FAST, FASTER, 0.002, 1.25),
        measured(SLOW, SLOWER, 0.0005, 0.75),
        measured(BAD, UNSAFE, 0.12, 1.6, crossover=None),
        measured("random_features(features=64)", UNSAFE, math.nan, 2.0, change=nothing, error=nothing, layers=()),
        measured("top_keys(keys=64)", ORACLE, 0.006, 1.0, time=Seconds(None, None, 0.05, None, None), points=()),
        Row("nystrom(landmarks=64)", REFUSED, REASON),
    )
    given = {
        "model": "minilm", "kind": "encoder", "data": "Python help topics", "documents": 4, "tokens": 512,
        "truncated": 3, "skipped": 1, "metric": "1 - cosine of the embedding", "tolerance": 0.01, "seeds": 2,
        "machine": {"cpu": "AMD EPYC", "threads": 2, "torch": "2.13.0", "sparing": "0.1.0"}, "batch": 4,
        "padding": 0.2, "rows": rows, "maps": maps(["exact", FAST, SLOW]),
        "summary": f"On 4 documents of up to 512 tokens, {FAST} is 1.25x as fast as the exact model here.",
    }  # fmt: skip
    return Comparison(**{**given, **options})
