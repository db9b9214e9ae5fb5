"""A target that answers at once, by a rule, until it is interrupted: for what the host does."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from ssd_jax.tools.distill.completions import CompletionJob
from ssd_jax.tools.distill.generate import generate
from ssd_jax.tools.distill.manifest import Manifest, read_manifest
from ssd_jax.tools.distill.prompt_ids import PromptIds
from ssd_jax.tools.distill.settings import GenerateSettings, TargetSettings

VOCABULARY = 300


@dataclasses.dataclass
class FakeTarget:
    """Stands for the engine and the scorer.

    Attributes:
      answered: indices of the requests that were answered, over all runs.
      scored: shards that were scored.
      patience: answers before it is interrupted; None is endless.
      reason: why answers end.
    """

    answered: list[int] = dataclasses.field(default_factory=list)
    scored: int = 0
    patience: int | None = None
    reason: str = "length"

    def install(self, monkeypatch) -> FakeTarget:
        monkeypatch.setattr("ssd_jax.llm.llm.LLM", lambda **_settings: _Engine(self))
        monkeypatch.setattr(
            "ssd_jax.tools.distill.scoring.load_scorer",
            lambda *_a, top_n, **_k: _Scorer(self, top_n),
        )
        return self

    def answer(self, ids, params, index) -> list[int]:
        if self.patience is not None:
            if self.patience == 0:
                raise KeyboardInterrupt
            self.patience -= 1
        self.answered.append(index)
        key = f"{list(ids)} {params.temperature} {params.seed} {index}"
        noise = hashlib.sha256(key.encode()).digest()
        return list(noise[: 1 + noise[0] % params.max_tokens])


class _Engine:
    def __init__(self, fake: FakeTarget) -> None:
        self._fake = fake

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        pass

    def load(self, *, progress):
        pass

    def request(self, ids, params, index):
        return ids, params, index

    def run(self, requests):
        for ids, params, index in requests:
            tokens = self._fake.answer(ids, params, index)
            yield SimpleNamespace(
                token_ids=tokens,
                prompt_index=index,
                output=SimpleNamespace(token_ids=tokens, finish_reason=self._fake.reason),
            )


class _Scorer:
    def __init__(self, fake: FakeTarget, top_n: int) -> None:
        self._fake, self._top_n = fake, top_n

    def run(self, samples) -> tuple[np.ndarray, np.ndarray]:
        self._fake.scored += 1
        rows = [sample.tokens[i] for sample in samples for i in sample.learnt]
        ids = np.array(rows)[:, None] + np.zeros(self._top_n, int)
        return ids, ids / 512


@contextlib.contextmanager
def no_bar(_label, *, unit):
    del unit
    yield None


def job(directory: Path, **changes) -> CompletionJob:
    """Twenty completions in several shards, half of them of plain text."""
    settings = {"completions": 20, "max_tokens": 6, "slots": 4, "shard_tokens": 40}
    settings |= {"top_n": 2, "seed": 3}
    prompts = [
        PromptIds(set="a", index=i, ids=[i] * (2 + i % 3), plain=i % 2 == 1) for i in range(8)
    ]
    directory.mkdir(exist_ok=True)
    return CompletionJob(
        target=TargetSettings(source="none"),
        settings=GenerateSettings(**settings | changes),
        prompts=prompts,
        vocabulary=VOCABULARY,
        limit=100,
        directory=directory,
        bar=no_bar,
    )


def run(job: CompletionJob) -> Manifest:
    """Goes on with what is there, as a stage does."""
    begun = Manifest(stage="generate", settings={}, inputs={"target": "t"})
    return generate(job, read_manifest(job.directory) or begun)


def files(directory: Path) -> dict[str, bytes]:
    """Every file by name."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
