"""A training run as a file: whole or not there."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from sparing.measure.cells import write_whole
from sparing.training.config import Config

FORMAT = 1
_ALWAYS = {"config", "fingerprint", "examples", "model", "step", "records", "task"}
_TO_GO_ON = {"optimizer", "losses", "times", "seconds", "scaler"}
_OUT = "delete it to start anew, or name another folder with --out"


def save(path: Path, held: dict[str, Any]) -> None:
    """Under another name first, so that the last good one stays until this one is complete."""
    written = io.BytesIO()
    torch.save({"sparing": FORMAT, **held}, written)
    write_whole(path, written.getvalue())


def load(path: Path, config: Config | None = None) -> dict[str, Any]:
    """What `save` wrote; config: the run that it must belong to."""
    try:
        with zipfile.ZipFile(path) as archive:
            whole = archive.testzip() is None  # torch does not look at the checksums
        held = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"checkpoint: there is no file {path}") from None
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile):
        whole, held = False, None
    if not whole:
        raise ValueError(f"checkpoint: {path} is damaged, or no checkpoint; {_OUT}")
    if not isinstance(held, dict) or "sparing" not in held:
        raise ValueError(f"checkpoint: {path} was not written by sparing train; {_OUT}")
    if held["sparing"] != FORMAT:
        raise ValueError(f"checkpoint: {path} has format {held['sparing']}; this version reads {FORMAT}; {_OUT}")
    if missing := (_ALWAYS if config is None else _ALWAYS | _TO_GO_ON) - held.keys():
        raise ValueError(f"checkpoint: {path} has no {', '.join(sorted(missing))}; {_OUT}")
    if config is not None and held["fingerprint"] != config.fingerprint:
        now, theirs = config.steps_taken(), held["config"]
        differ = [f"{n}={theirs.get(n)!r}, now {v!r}" for n, v in now.items() if theirs.get(n) != v]
        raise ValueError(f"checkpoint: {path} is of another run ({'; '.join(differ)}); name another folder with --out")
    found: dict[str, Any] = held
    return found
