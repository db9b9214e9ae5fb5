"""What a draft worker is started with: one line of JSON on its standard input."""

from __future__ import annotations

import dataclasses
import json

from ssd_jax.runtime.worker.messages import Hello


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Attributes:
    token: secret that who opens a stream must know.
    hello: what the worker must be; also see `config.Config` for the others.
    target: source of the target, where the draft takes tensors from it; None where it needs none.
    support: N of the draws; coupled proposals tell none of it.
    cores: to run on; None is wherever the system likes.
    budgets: numbers of branches that there are programs for; the most is the `hello`'s.
    urgent: an engine waits: what expands records into the most branches is loaded first, programs
      of fewer and of just-in-time drafts when the worker is ready.
    """

    token: str
    hello: Hello
    source: str
    target: str | None
    dtype: str
    support: int
    saguaro_c: float
    predict: str
    confident: bool
    draft_temperature: float | None
    compile_cache: str | None
    cores: tuple[int, ...] | None
    budgets: tuple[int, ...]
    urgent: bool = False

    @property
    def greedy(self) -> bool:
        """Whether all proposals are the draft's likeliest tokens, so that no q travels."""
        return self.draft_temperature == 0

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerSettings:
        """What `to_json` gave."""
        values = json.loads(text)
        values["hello"] = Hello(**values["hello"])
        values["cores"] = None if values["cores"] is None else tuple(values["cores"])
        values["budgets"] = tuple(values["budgets"])
        return cls(**values)
