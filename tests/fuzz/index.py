"""`sparing.Index` on sequences that grow, shrink, branch and are copied, held to the rows of one call over all of it."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import sparing
from tests.fuzz.index_draw import Step, draw, shrink
from tests.fuzz.index_inputs import drawn, laid, shown

__all__ = ["NAME", "calls", "check", "draw", "shrink"]

NAME = "index"
MODES: dict[str, Callable[[], Any]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
BASE = {torch.float64: 1e-9, torch.float32: 1e-5}  #: as the tests of the index have it
ARGUMENTS = r"\b(query|key|value|attn_mask|length|items)\b"
LARGE = 1e6  #: entries beyond it are not ordinary


def calls(case: dict[str, Any]) -> int:
    """Return how many steps a case has; each is one call of an index, and several of what it is held to."""
    return len(case["steps"])


@dataclass
class Branch:
    """A sequence, what an index knows of it, and the outputs that are not checked yet."""

    index: sparing.Index
    shadow: sparing.Index  #: the same history, in one mode, with contiguous tensors, never copied
    x: tuple[Tensor, Tensor, Tensor]  #: q, k, v so far
    keep: Tensor  #: (B, n)
    found: list[tuple[int, int, Tensor, Tensor | None]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.keep.shape[1]

    def copied(self, how: str) -> Branch:
        index = copy.deepcopy(self.index) if how == "deepcopy" else pickle.loads(pickle.dumps(self.index))
        with torch.inference_mode(False):
            shadow = copy.deepcopy(self.shadow)
        return replace(self, index=index, shadow=shadow, found=[])


class Run:
    """A case that is being run."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.dtype = case, getattr(torch, case["dtype"])
        self.method = sparing.method(case["spec"])
        self.wide = self.dtype if self.dtype in BASE else torch.float32
        self.others: list[Branch] = []  #: those that were copied from
        self.now = self.fresh()
        self.number = -1

    @property
    def scale(self) -> float:
        given = self.case["scale"]
        return float(self.case["d"] ** -0.5 if given is None else given)

    def options(self) -> dict[str, Any]:
        return {name: self.case[name] for name in ("seed", "scale", "streams")}

    def fresh(self) -> Branch:
        c = self.case
        sizes = ((c["heads"], c["d"]), (c["kv_heads"], c["d"]), (c["kv_heads"], c["e"]))
        x = tuple(torch.zeros(c["batch"], h, 0, d, dtype=self.dtype) for h, d in sizes)
        indices = (sparing.Index(self.method, **self.options()) for _ in range(2))
        return Branch(*indices, x, torch.ones(c["batch"], 0, dtype=torch.bool))

    def run(self) -> None:
        for number, step in enumerate(self.case["steps"]):
            self.number = number
            getattr(self, "_" + step["do"])(step)
            if self.now.index.length != self.now.length:
                raise AssertionError(f"{self._where()}: length {self.now.index.length}, wanted {self.now.length}")
        self.number += 1
        last = {"data": 1, "count": 3, "mode": "plain", "layout": "plain", "hide": None, "odd": [], "mask": "two"}
        for branch in (*self.others, self.now):  # a copy leaves what it was copied from alone
            self.now = branch
            self._attention(last)
            self.verify()

    # What steps do.

    def _tokens(self, step: Step) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Let the sequence grow; what the index gets, and what its shadow gets."""
        b, n = self.now, step["count"]
        gen = torch.Generator().manual_seed(step["data"])
        new, keep = drawn(self.case, b.keep.shape[0], n, gen), shown(b.keep.shape[0], n, step["hide"], gen)
        for which, value in (odd.split(":") for odd in step["odd"]):
            x = new["qkv".index(which)]
            at = [int(torch.randint(size, (), generator=gen)) for size in x.shape]
            x[tuple(at)] = float(value)  # in 16 bits it may be infinite
        b.x = tuple(torch.cat([old, y.to(self.dtype)], 2) for old, y in zip(b.x, new, strict=True))  # type: ignore[assignment]
        b.keep = torch.cat([b.keep, keep], 1)
        q, k, v = b.x[0][:, :, -n:], b.x[1], b.x[2]
        mask = None if bool(b.keep.all()) and step["mask"] == "none" else b.keep
        given = tuple(x.clone() for x in (q, k, v)) if step["layout"] == "plain" else laid(step["layout"], q, k, v)
        shaped = None if mask is None else mask.clone()
        if shaped is not None and step["mask"] == "four":
            shaped = shaped[:, None, None, :]
        return (*given, shaped), (q, k, v, mask)

    def _attention(self, step: Step) -> None:
        with MODES[step["mode"]]():
            before = (self.now.x, self.now.keep)
            given, plain = self._tokens(step)
            try:
                kept = self.now.index.attention(*given).clone()
            except ValueError as error:
                self._undo(error, before)
                return
            for x in given:  # the index may not hold on to what it was given
                if x is not None:
                    x.fill_(torch.nan) if x.is_floating_point() else x.logical_not_()
        with torch.inference_mode(False), torch.no_grad():
            other = self.now.shadow.attention(*plain)
            self._shapes(kept, step["count"])
            self.now.found.append((self.now.length - step["count"], self.now.length, kept, other))

    def _append(self, step: Step) -> None:
        with MODES[step["mode"]]():
            before = (self.now.x, self.now.keep)
            given, plain = self._tokens(step)
            try:
                self.now.index.append(*given)
            except ValueError as error:
                self._undo(error, before)
                return
        with torch.inference_mode(False):
            self.now.shadow.append(*plain)

    def _undo(self, error: ValueError, before: tuple[tuple[Tensor, Tensor, Tensor], Tensor]) -> None:
        """Take back new positions that were refused, as only entries beyond what products can hold may be."""
        b, limit = self.now, 1e147 if self.dtype == torch.float64 else 1.8e12
        shown = b.keep[:, None, :, None].clone()
        largest = max(float(x.clone().double().masked_fill(~shown | ~x.isfinite(), 0.0).abs().max()) for x in b.x)
        if largest < limit or not re.search(ARGUMENTS, str(error)):
            raise AssertionError(f"{self._where()}: refused entries of up to {largest:.1e}: {error}") from error
        b.x, b.keep = before

    def _crop(self, step: Step) -> None:
        self.verify()
        b = self.now
        length = max(b.length - step["by"], 0)
        with MODES[step["mode"]]():
            b.x = tuple(x[:, :, :length].clone() for x in b.x)  # type: ignore[assignment]
            b.keep = b.keep[:, :length].clone()
            b.index.crop(length)
        with torch.inference_mode(False):
            b.shadow.crop(length)

    def _select(self, step: Step) -> None:
        self.verify()
        b, gen = self.now, torch.Generator().manual_seed(step["data"])
        items = torch.randint(0, b.keep.shape[0], (step["count"],), generator=gen)
        with MODES[step["mode"]]():
            items = items.clone()
            b.x, b.keep = tuple(x[items] for x in b.x), b.keep[items]  # type: ignore[assignment]
            b.index.select(items)
        with torch.inference_mode(False):
            b.shadow.select(items.clone())

    def _copy(self, step: Step) -> None:
        self.verify()
        with MODES[step["mode"]]():
            self.others.append(self.now)
            self.now = self.now.copied(step["how"])

    def _back(self, step: Step) -> None:
        """Go on with the oldest original; the copy waits."""
        if self.others:
            self.verify()
            self.others.append(self.now)
            self.now = self.others.pop(0)

    def _reset(self, step: Step) -> None:
        self.verify()
        with MODES[step["mode"]]():
            self.now.index.reset()
        self.now = replace(self.fresh(), index=self.now.index)

    def _wrong(self, step: Step) -> None:
        """What must be refused by an error that names an argument, and leave the index as it was."""
        b, what = self.now, step["what"]
        if not b.length:
            return
        more = drawn(self.case, b.keep.shape[0], 1, torch.Generator().manual_seed(0))
        q, k, v = (torch.cat([x, y.to(self.dtype)], 2) for x, y in zip(b.x, more, strict=True))
        q, n, keep = q[:, :, -1:], b.length, torch.cat([b.keep, torch.ones_like(b.keep[:, :1])], 1)
        bad: dict[str, Callable[[], Any]] = {
            "another batch": lambda: b.index.attention(*(x.repeat(2, 1, 1, 1) for x in (q, k, v)), keep.repeat(2, 1)),
            "another type": lambda: b.index.attention(q.to(torch.complex64), k, v, keep),
            "no queries": lambda: b.index.attention(q[:, :, :0], k[:, :, :n], v[:, :, :n], keep[:, :n]),
            "a gap": lambda: b.index.attention(q, *(torch.cat([x, x[:, :, -1:]], 2) for x in (k, v))),
            "shrank": lambda: b.index.append(q, k[:, :, 1:], v[:, :, 1:]),
            "another mask": lambda: b.index.attention(q, k, v, torch.cat([~keep[:, :1], keep[:, 1:]], 1)),
            "wide mask": lambda: b.index.append(q, k, v, keep[:, None].expand(-1, 3, -1)),
            "gradient": lambda: b.index.attention(q.clone().requires_grad_(), k, v, keep),
            "crop beyond": lambda: b.index.crop(n + 1),
            "crop by a float": lambda: b.index.crop(1.0),  # type: ignore[arg-type]
            "items beyond": lambda: b.index.select(torch.tensor([b.keep.shape[0]])),
            "no items": lambda: b.index.select(torch.tensor([], dtype=torch.long)),
            "items of floats": lambda: b.index.select(torch.tensor([0.0])),
            "more heads": lambda: b.index.attention(torch.cat([q, q], 1), k, v, keep),
        }
        try:
            bad[what]()
        except (ValueError, TypeError) as error:
            if not re.search(ARGUMENTS, str(error)):
                raise AssertionError(f"{self._where()}: the error names no argument: {error}") from error
        else:
            raise AssertionError(f"{self._where()}: {what} was not refused")

    # What they are held to.

    def verify(self) -> None:
        """Hold the outputs so far to one call over the whole sequence, and where that is the promise, to softmax."""
        b = self.now
        if not b.found:
            return
        with torch.inference_mode(False), torch.no_grad():
            q, k, v = (x.clone().to(self.wide) for x in b.x)
            keep = b.keep.clone()
            mask = None if bool(keep.all()) else keep[:, None, None, :]
            wanted = sparing.attention(
                q, k, v, mask, is_causal=True, enable_gqa=q.shape[1] != k.shape[1], method=self.method, **self.options()
            )
            exact, ordinary = self._softmax(q, k, v, keep)
            size, steep = self._sizes(q, k, v)
            base = max(BASE[self.wide], 32 * torch.finfo(self.wide).eps * steep)
            for start, end, out, shadow in b.found:
                rows = keep[:, None, start:end, None]
                found = out.clone().to(self.wide)
                if start and bool((found.masked_fill(rows, 0.0) != 0).any()):
                    raise AssertionError(f"{self._where()}: rows {start} to {end} of padding are not zero")
                allowed = base * size + self._own_rounding(q[:, :, start:end], k) * size
                if self.dtype not in BASE:
                    allowed = allowed + 2 * torch.finfo(self.dtype).eps * size
                clear = self._no_near_ties(q, k, keep, start, end)
                pieces = [(wanted[:, :, start:end].where(clear, found), "prefill")]
                pieces += [(shadow.to(self.wide), "the same steps in one mode")]
                if ordinary and self._dense(end, keep):
                    pieces += [(exact[:, :, start:end], "softmax")]
                for other, name in pieces:
                    self._compare(found, other.to(self.wide), rows, allowed, f"rows {start} to {end} and {name}")
        b.found = []

    def _compare(self, found: Tensor, wanted: Tensor, rows: Tensor, allowed: Tensor, what: str) -> None:
        rows = rows.expand_as(found)
        nan = found.isnan() != wanted.isnan()
        if bool((nan & rows).any()):
            raise AssertionError(f"{self._where()}: {what}: NaN in {int((nan & rows).sum())} other entries")
        far = ((found - wanted).abs() / allowed).masked_fill(~rows | wanted.isnan() | (found == wanted), 0.0)
        if not float(far.max()) <= 1:
            at = int(far.argmax())
            raise AssertionError(
                f"{self._where()}: {what} differ by {float((found - wanted).abs().flatten()[at]):.2e}, "
                f"allowed {float(allowed.expand_as(found).flatten()[at]):.2e}"
            )

    def _no_near_ties(self, q: Tensor, k: Tensor, keep: Tensor, start: int, end: int) -> Tensor:
        """(B, H, rows, 1): whether rounding cannot decide which is the last of the keys that `top_keys` takes."""
        count = self.method.keys if self.method.name == "top_keys" else end
        if count >= end:
            return torch.ones((), dtype=torch.bool)
        scores = self._logits(q, k, keep)[:, :, start:end]
        last = scores.nan_to_num(0.0, neginf=-torch.inf).topk(count + 1, dim=-1).values[..., -2:]
        size = scores.masked_fill(~scores.isfinite(), 0.0).abs().amax(-1)
        return ~((last[..., 0] - last[..., 1]) <= 8 * torch.finfo(self.wide).eps * size).unsqueeze(-1)

    def _logits(self, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
        """(B, H, n, n) in float64; -inf for keys that a query does not see."""
        q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril() & keep[:, None, None, :]
        return (q @ k.mT * self.scale).masked_fill(~seen, -torch.inf)

    def _dense(self, end: int, keep: Tensor) -> bool:
        """Whether the rows before `end` are those of softmax attention: the budget holds all keys."""
        m: Any = self.method
        if m.name == "window":
            return bool(m.size >= end - 1)
        return m.tolerance == 0.0 if m.name == "multipole" else bool(m.keys >= end)

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, bool]:
        """Causal attention in float64, and whether all entries are ordinary numbers."""
        ordinary = all(bool((x.abs() < LARGE).all()) for x in (q, k, v))
        values = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
        return self._logits(q, k, keep).softmax(-1).nan_to_num(0.0) @ values, ordinary

    def _sizes(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, float]:
        """The largest value of each column, at least 1, and the largest logit whose rounding others feel."""
        q, k = (x.double().masked_fill(~(x.abs() < LARGE), 0.0).norm(dim=-1) for x in (q, k))
        size = v.masked_fill(~v.isfinite(), 0.0).abs().amax(2, keepdim=True).clamp_min(1.0)
        return size.repeat_interleave(q.shape[1] // k.shape[1], 1), float(q.max() * k.max()) * abs(self.scale)

    def _own_rounding(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, H, rows, 1): rounding of the logits of each query alone, whose row is computed in float64 if they are large."""
        q, k = (_norms(x.double().nan_to_num(0.0, 0.0, 0.0)) for x in (q, k))
        own = q * abs(self.scale) * k.max()  # in this order: a scale of 0 makes 0 of products that overflow
        return 32 * torch.finfo(torch.float64).eps * own

    def _shapes(self, out: Tensor, count: int) -> None:
        c, b = self.case, self.now
        shape = (b.keep.shape[0], c["heads"], count)
        if out.shape != (*shape, c["e"]) or out.dtype != self.dtype:
            raise AssertionError(f"{self._where()}: output {list(out.shape)} {out.dtype}")
        for name, x in b.index.statistics.items():
            if x.shape != shape:
                raise AssertionError(f"{self._where()}: statistics {name} {list(x.shape)}, wanted {list(shape)}")

    def _where(self) -> str:
        return f"{self.method.name}, step {self.number}"


def _norms(x: Tensor) -> Tensor:
    """Norms of the last axis, kept, of entries whose squares may overflow."""
    size = x.abs().amax(-1, keepdim=True)
    return size * (x / size.masked_fill(size == 0, 1.0)).norm(dim=-1, keepdim=True)


def check(case: dict[str, Any]) -> None:
    """Run a case, and raise AssertionError where the index breaks what it promises."""
    with nullcontext() if case["kernels"] else patch("sparing.native.ready", lambda *_, **__: False):
        Run(case).run()
