"""Drafts and fan-out policies that a program gives to `LLM` as Python."""

from __future__ import annotations

from typing import Any, NamedTuple

from ssd_jax.config.objects import name_of
from ssd_jax.errors import InputError
from ssd_jax.placement.host_branching import HostBranchingDraft
from ssd_jax.placement.host_drafter import HostDrafter
from ssd_jax.roles.protocols import BranchingDraft, Drafter, DraftFactory
from ssd_jax.roles.records import DraftSetup
from ssd_jax.speculation.checked_fan_out import CheckedFanOut
from ssd_jax.speculation.fan_out import FanOut, FanOutFactory

_DRAFTER_METHODS = ("open", "set_pages", "prefill", "gather", "propose", "speculate")
_BRANCHING_METHODS = ("open", "set_pages", "prefill", "record", "expand", "close")
_FAN_OUT_METHODS = ("counts", "observe")


class Custom(NamedTuple):
    """What makes the draft of an engine, and the policy of a sequence; None is as the settings say.

    Anything that can be called, such as a class. Nothing that these make is trusted, except that a
    draft whose factory has `draws_from_q = True` draws its tokens from the q that it gives.
    """

    draft: DraftFactory | None = None
    fan_out: FanOutFactory | None = None

    @property
    def draws_from_q(self) -> bool:
        """Whether the draft draws its tokens from the q that it gives."""
        return bool(getattr(self.draft, "draws_from_q", False))

    def check(self, mode: str) -> None:
        """Refuses classes that lack what a mode calls, before anything is loaded.

        Raises:
          InputError: such a class.
        """
        if isinstance(self.draft, type):
            _check_draft(self.draft, self.draft, mode)
        if isinstance(self.fan_out, type):
            start = f"fan_out = {name_of(self.fan_out)}: a FanOut"
            _require(self.fan_out, _FAN_OUT_METHODS, FanOut, start)

    def drafter(self, setup: DraftSetup, width: int) -> HostDrafter:
        """The drafter of an engine of mode sd.

        Args:
          width: see `HostDrafter`.

        Raises:
          InputError: what was made is no drafter for this.
        """
        draft: Any = self._make_draft(setup, "sd", ("k",))
        name = name_of(self.draft)
        return HostDrafter(draft, setup, name=name, width=width, draws_from_q=self.draws_from_q)

    def branching(self, setup: DraftSetup) -> HostBranchingDraft:
        """The draft of an engine of mode ssd.

        Raises:
          InputError: what was made is no branching draft for this.
        """
        draft: Any = self._make_draft(setup, "ssd", ("slots", "k", "branches"))
        name = name_of(self.draft)
        return HostBranchingDraft(draft, setup, name=name, draws_from_q=self.draws_from_q)

    def _make_draft(self, setup: DraftSetup, mode: str, sizes: tuple[str, ...]) -> object:
        assert self.draft is not None
        draft = self.draft(setup)
        _check_draft(self.draft, draft, mode)
        for size in sizes:
            value, expected = getattr(draft, size, None), getattr(setup, size)
            if value != expected:
                raise InputError(
                    f"draft = {name_of(self.draft)}: {size} = {value!r}, and it was made for "
                    f"{size} = {expected}; take it from the DraftSetup"
                )
        return draft

    def new_fan_out(self) -> FanOut:
        """The policy of a sequence.

        Raises:
          InputError: what was made is no policy.
        """
        assert self.fan_out is not None
        policy, name = self.fan_out(), name_of(self.fan_out)
        _require(policy, _FAN_OUT_METHODS, FanOut, f"fan_out = {name}: a FanOut")
        return CheckedFanOut(policy, name)


def _check_draft(factory: object, draft: object, mode: str) -> None:
    start = f"draft = {name_of(factory)}: mode = {mode!r} takes a "
    if mode == "sd":
        _require(draft, _DRAFTER_METHODS, Drafter, f"{start}Drafter")
    else:
        _require(draft, _BRANCHING_METHODS, BranchingDraft, f"{start}BranchingDraft")


def _require(value: object, methods: tuple[str, ...], protocol: type, start: str) -> None:
    """Refuses an object, or a class, that lacks methods; a protocol's empty ones do not count."""
    value_type = value if isinstance(value, type) else type(value)
    empty = {"propose", "record", "expand", "counts"}
    missing = [
        name
        for name in methods
        if not callable(getattr(value, name, None))
        or (name in empty and getattr(value_type, name, None) is getattr(protocol, name))
    ]
    if missing:
        raise InputError(f"{start}, and this has no {', '.join(missing)}")


def is_factory(name: str, value: object) -> bool:
    """Whether the value of a setting is a factory of an object.

    Raises:
      InputError: it is an object that a factory would make.
    """
    if callable(value):
        return True
    if any(hasattr(value, method) for method in ("propose", "record", "counts")):
        kind = type(value).__name__
        whose = "each engine" if name == "draft" else "each sequence"
        raise InputError(
            f"{name} = {value!r}: {whose} needs one of its own; give what makes it, such as the "
            f"class: {name}={kind}"
        )
    return False
