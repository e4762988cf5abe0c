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


def save(path: Path, held: dict[str, Any]) -> None:
    """Under another name first, so that the last good one stays until this one is complete."""
    written = io.BytesIO()
    torch.save({"sparing": FORMAT, **held}, written)
    write_whole(path, written.getvalue())


def load(path: Path, config: Config | None = None) -> dict[str, Any]:
    """What `save` wrote; config: the run that it must belong to."""
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"checkpoint: there is no file {path}") from None
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile):
        raise ValueError(f"checkpoint: {path} is damaged, or no checkpoint") from None
    if not isinstance(held, dict) or "sparing" not in held:
        raise ValueError(f"checkpoint: {path} was not written by sparing train")
    if held["sparing"] != FORMAT:
        raise ValueError(f"checkpoint: {path} has format {held['sparing']}; this version reads {FORMAT}")
    if config is not None and held["fingerprint"] != config.fingerprint:
        theirs = held["config"]
        differ = [f"{n}={theirs.get(n)!r}, now {v!r}" for n, v in vars(config).items() if theirs.get(n) != v]
        raise ValueError(f"checkpoint: {path} is of another run ({'; '.join(differ)}); name another folder with --out")
    found: dict[str, Any] = held
    return found
