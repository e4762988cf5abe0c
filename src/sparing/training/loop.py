"""The loop: batches, steps, evaluations, checkpoints; one process or several, on one machine or many."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from sparing.tasks.batches import Batches
from sparing.tasks.trainable import Split, Task
from sparing.training import checkpoint
from sparing.training.config import Config
from sparing.training.objectives import Inputs, inputs_of, losses, model_for
from sparing.training.watch import Stopped, first_bad_gradient, first_bad_output

Record = dict[str, float]  #: of an evaluation
_TRIED = 32  # examples of an evaluation that run at once


@dataclass(frozen=True)
class Trained:
    """What came of a run."""

    config: Config
    task: Task
    records: tuple[Record, ...]
    best: Record
    losses: tuple[float, ...]  #: of every step
    seconds: float

    @property
    def metric(self) -> float:
        """Of the best evaluation."""
        return self.best[self.task.metric]


class Training:
    """A run that can be stopped after any step and goes on as if it had not been."""

    def __init__(
        self, config: Config, folder: Path | None = None, *, tell: Callable[[str, int, int], None] | None = None
    ) -> None:
        from accelerate import Accelerator

        self.config, self.folder = config, folder
        self.tell = tell or (lambda text, done, steps: None)
        self.task = config.load()
        if config.batch > len(self.task.train):
            raise ValueError(
                f"batch={config.batch} is more than the {len(self.task.train)} examples of {self.task.name}"
            )
        self.accelerator = Accelerator(mixed_precision=config.precision)
        if (config.batch // config.accumulate) % self.accelerator.num_processes:
            raise ValueError(
                f"batch={config.batch} in accumulate={config.accumulate} parts does not divide among "
                f"{self.accelerator.num_processes} processes"
            )
        torch.manual_seed(config.seed)
        model = model_for(self.task, config)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.rate, betas=(0.9, 0.999), eps=1e-6, weight_decay=config.decay
        )
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.batches = Batches(len(self.task.train), config.batch, seed=config.seed, lengths=self.task.train.lengths)
        self.step, self.seconds = 0, 0.0
        self.losses: list[float] = []
        self.records: list[Record] = []

    @property
    def bare(self) -> Any:
        """The model without what processes wrap around it."""
        return self.accelerator.unwrap_model(self.model)

    def run(self) -> Trained:
        """The steps that are left."""
        while self.step < self.config.steps:
            self.losses.append(self._step())
            self.step += 1
            self.tell(f"loss {self.losses[-1]:.3f}", self.step, self.config.steps)
            if self.step % self.config.every == 0 or self.step == self.config.steps:
                self.records.append({"step": float(self.step), "loss": self.losses[-1], **self.evaluate()})
                self._save()
        return Trained(
            self.config, self.task, tuple(self.records), self._best(), tuple(self.losses), self.seconds
        )  # fmt: skip

    def resume(self) -> bool:
        """Go on from the last checkpoint; False: there is none."""
        path = self._path("last")
        if path is None or not path.exists():
            return False
        held = checkpoint.load(path, self.config)
        self.bare.load_state_dict(held["model"])
        self.optimizer.load_state_dict(held["optimizer"])
        self.step, self.seconds = held["step"], held["seconds"]
        self.losses, self.records = list(held["losses"]), list(held["records"])
        return True

    def _step(self) -> float:
        start = time.perf_counter()
        config, accelerator = self.config, self.accelerator
        # Random numbers hang on the step, not on how often this run was stopped; all processes draw the same ones.
        torch.manual_seed(Random(f"step {config.seed} {self.step}").getrandbits(63))
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = config.rate_at(self.step)
        parts = self._parts()
        counts = torch.tensor([sum(part.asked for part in parts), sum(len(part.targets) for part in parts)])
        asked, examples = accelerator.reduce(counts.to(accelerator.device), reduction="sum").tolist()
        total = torch.zeros((), device=accelerator.device)
        for number, part in enumerate(parts):
            with self._synchronised(last=number == len(parts) - 1):
                found = losses(self.model, part)
                loss = found.loss / asked
                if found.order is not None:
                    loss = loss + found.order / examples
                accelerator.backward(loss * accelerator.num_processes)  # which averages over processes
                total += loss.detach()
        value = float(accelerator.reduce(total, reduction="sum"))
        if not math.isfinite(value):
            self._stop(parts, value)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), config.clip)
        if norm is not None and not bool(torch.as_tensor(norm).isfinite()) and config.precision != "fp16":
            self._stop(parts, value)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds += time.perf_counter() - start
        return value

    def _parts(self) -> list[Inputs]:
        """What this process runs of the step, in as many parts as the batch is cut into."""
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        mine = self.batches.part(self.step, rank, ranks)
        size = len(mine) // self.config.accumulate
        return [self._inputs(self.task.train, mine[at : at + size], self.step) for at in range(0, len(mine), size)]

    def _inputs(self, split: Split, numbers: Sequence[int], step: int | str) -> Inputs:
        seeds = [Random(f"hide {self.config.seed} {step} {number}").getrandbits(63) for number in numbers]
        found = inputs_of(self.task, [split[number] for number in numbers], seeds)
        return found.to(self.accelerator.device)

    def _synchronised(self, *, last: bool) -> Any:
        from contextlib import nullcontext

        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def _stop(self, parts: Sequence[Inputs], value: float) -> None:
        for part in parts:
            where = first_bad_output(self.bare, lambda part=part: self.bare(**part.arguments))
            if where is not None:
                raise Stopped(f"step {self.step}: the output of {where} is not finite; the loss is {value}")
        where = first_bad_gradient(self.bare)
        raise Stopped(f"step {self.step}: the gradient of {where} is not finite; the loss is {value}")

    @torch.no_grad()
    def evaluate(self) -> Record:
        """On the examples that are held out, shared among processes."""
        state = torch.get_rng_state()
        torch.manual_seed(self.config.seed)
        self.model.eval()
        rank, ranks, split = self.accelerator.process_index, self.accelerator.num_processes, self.task.valid
        mine = range(rank, len(split), ranks)
        sums = torch.zeros(5, dtype=torch.float64, device=self.accelerator.device)
        for at in range(0, len(mine), _TRIED):
            part = self._inputs(split, mine[at : at + _TRIED], "valid")
            with self.accelerator.autocast():
                found = losses(self.bare, part)
            order = torch.zeros(()) if found.order is None else found.order
            each = (float(found.loss), float(found.right), part.asked, float(order), len(part.targets))
            sums += torch.tensor(each, dtype=torch.float64, device=sums.device)
        torch.set_rng_state(state)
        loss, right, asked, order, examples = self.accelerator.reduce(sums, reduction="sum").tolist()
        found_: Record = {"valid_loss": loss / asked, "accuracy": right / asked}
        if self.task.metric == "perplexity":
            found_["perplexity"] = math.exp(min(loss / asked, 50))
        if self.task.objective == "order":
            found_["order_loss"] = order / examples
        return found_

    def _best(self) -> Record:
        key = self.task.metric
        return (min if key == "perplexity" else max)(self.records, key=lambda record: record[key])

    def _path(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{name}.pt"

    def _save(self) -> None:
        if self.folder is None or not self.accelerator.is_main_process:
            return
        held: dict[str, Any] = {
            "config": asdict(self.config), "fingerprint": self.config.fingerprint,
            "model": _cpu(self.bare.state_dict()), "step": self.step, "records": self.records, "task": self.task.name,
        }  # fmt: skip
        if self._best() is self.records[-1]:
            checkpoint.save(self.folder / "best.pt", held)
        more = {"optimizer": self.optimizer.state_dict(), "losses": self.losses, "seconds": self.seconds}
        checkpoint.save(self.folder / "last.pt", {**held, **more})


def _cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in state.items()}


def train(config: Config, folder: Path | None = None, **options: Any) -> Trained:
    """A whole run; with a folder, from where it was."""
    training = Training(config, folder, **options)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        training.resume()
    return training.run()
