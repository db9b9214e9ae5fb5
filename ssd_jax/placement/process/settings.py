"""What a draft worker is started with, and what it reports: lines of JSON."""

from __future__ import annotations

import msgspec

from ssd_jax.placement.process.messages import Hello


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
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


class Report(msgspec.Struct, omit_defaults=True):
    """A worker's first line: its address when it is ready, or what went wrong."""

    address: str = ""
    error: str = ""
