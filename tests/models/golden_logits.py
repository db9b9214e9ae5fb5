"""Logits of small models that transformers computed."""

from pathlib import Path

import numpy as np

GOLDENS = Path(__file__).parent.parent / "goldens" / "logits"

NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/logits.npz"))


def golden(name):
    with np.load(GOLDENS / name / "logits.npz") as stored:
        return stored["tokens"].astype(np.int32), stored["logits"]
