"""The sides of the paper's table 4, timed in one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch

from sparing.contract import method
from sparing.workbench import memory
from sparing.workbench.benchmark import gate
from sparing.workbench.benchmark.bench import rounds_for
from sparing.workbench.benchmark.workload import (
    AttentionInputs,
    Workload,
    clustered,
    learned_state,
    method_work,
    sdpa_work,
    softmax_work,
)
from sparing.workbench.timing import interval, race
from sparing_lab.studies.rows import Row

SELF, FUSED = "self-attention", "SDPA"  #: with the whole matrix, as the paper timed it; torch's fused kernel
HASHES = (16, 32, 64, 128)
SPECS = {
    **{f"YOSO-{m}": f"yoso(hashes={m})" for m in HASHES},  # bits: log2 of the length
    **{f"Linformer-{r}": f"linformer(rank={r})" for r in (128, 256)},
    **{f"Reformer-{r}": f"lsh(rounds={r}, combine=sum, align=rank)" for r in (2, 4, 8)},
    **{f"Longformer-{w}": f"window(size={w})" for w in (64, 128, 256, 512)},
}
GATE, WIDTH = 300, 64  #: tokens and width for the comparison with a reference
_MATRICES = 6  # n x n matrices that training with self-attention holds at once
_FREE = 0.7  # share of the free memory that may be used


def work_of(side: str, inputs: AttentionInputs) -> Workload:
    """Return the work of a side on the inputs."""
    if side == SELF:
        return softmax_work(inputs)
    if side == FUSED:
        return sdpa_work(inputs, torch.float32)
    one = method(SPECS[side])
    return method_work(one, inputs, state=learned_state(one, inputs))


def race_at(inputs: AttentionInputs, sides: Sequence[str], seconds: float) -> list[Row]:
    """Measure time and memory of every side, in one run, round by round; a side that cannot run states why.

    Memory is the peak of a call beyond its inputs, as the operating system reports it, plus these inputs.
    """
    own = sum(x.nbytes for x in (inputs.q, inputs.k, inputs.v))
    rows: dict[str, Row] = {side: {"side": side, "why": _refusal(side, inputs)} for side in sides}
    works = {side: work_of(side, inputs) for side in sides if not rows[side]["why"]}
    for side, work in works.items():
        rows[side]["cache"] = work.kept_bytes()
        for name, backward in (("testing", False), ("training", True)):
            call = work.call(backward=backward)
            call()
            extra = memory.peak_extra_bytes(call)
            rows[side][name] = None if extra is None else extra + own
    passes: dict[str, Callable[[Workload], Callable[[], object]]] = {
        "forward": lambda work: work.call(backward=False),
        "backward": Workload.gradients,
    }
    for part, build in passes.items():
        taken = dict(zip(works, timed([build(work) for work in works.values()], seconds), strict=True))
        for side, mine in taken.items():
            rows[side][part] = interval(mine).median
            for rival in (SELF, FUSED):
                if rival in taken:  # only rounds that both ran
                    rows[side][f"{part} {rival}"] = interval([a / b for a, b in zip(taken[rival], mine)])  # noqa: B905
    return list(rows.values())


def timed(calls: Sequence[Callable[[], object]], seconds: float) -> list[list[float]]:
    """Return the seconds of each call, interleaved, after a warm-up that determines the number of rounds."""
    for call in calls:
        call()
    once = [each[0] for each in race(calls, [1] * len(calls))]
    rounds = [max(rounds_for(each, seconds), 2) for each in once]
    return race(calls, rounds, [min(max(math.ceil(0.02 / each), 1), 20) for each in once])


def _refusal(side: str, inputs: AttentionInputs) -> str:
    if side == SELF:
        batch, heads, length, _ = inputs.q.shape
        needed, free = _MATRICES * 4 * batch * heads * length**2, memory.available_bytes()
        if free is not None and needed > _FREE * free:
            return f"about {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free"
        return ""
    return "" if side == FUSED else red(SPECS[side])


@cache
def red(spec: str) -> str:
    """Return why no time may be stated for a method; empty where it computes what its reference does."""
    found = gate.check(method(spec), clustered(1, 2, GATE, WIDTH), backward=True)
    return "" if found.passed else f"differs from its reference: {found.detail}"
