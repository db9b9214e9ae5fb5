"""Messages between leader and followers, as msgpack; types define what a message may be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from ssd_jax.roles.records import SlotOpening
from ssd_jax.sampling.params import Report
from ssd_jax.wire.codec import plain
from ssd_jax.wire.messages import Count, Number, PackedArray

Slot = Annotated[int, Meta(ge=0, lt=2**20)]
Tokens = list[Count]
Role = Literal["target", "drafter"]


class HostMessage(
    msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True
):
    """Base of all messages."""


class Greeting(HostMessage, frozen=True):
    """A follower's first message: which process of the job it is."""

    index: Count
    name: str


class Facts(HostMessage, frozen=True):
    """From a follower, which waits for a `Go`: what must be the same on all hosts, by name."""

    values: dict[str, str]


class Go(HostMessage, frozen=True):
    """From the leader: all hosts have the same facts."""


class LoadReport(HostMessage, frozen=True):
    """From the leader: see `logprob_programs.load`.

    A follower makes calls meanwhile, and answers by `Facts`.
    """

    report: Report


class LeaderSettings(HostMessage, frozen=True):
    """From the leader: fields of its `Config`, and the values of K to prepare for."""

    config: dict[str, Any]
    ks: list[int]


class Refuse(HostMessage, frozen=True):
    """Why all processes end; a follower sends it to the leader, the leader to all."""

    why: str
    status: int = 1


class End(HostMessage, frozen=True):
    """From the leader: it needs nothing more."""


class SeenOutcome(HostMessage, frozen=True):
    """From a follower: the checksum of the outcome that it read of a call."""

    call: Number
    outcome: int


class Call(HostMessage, frozen=True):
    """From the leader: a call of an engine's role, which the leader makes at the same time.

    Attributes:
      before: checksum of all calls before this one; a follower that has made others has erred.
      engine: number of the engine.
    """

    before: int
    engine: Count


class NewEngine(Call, frozen=True):
    """New roles, see `Loaded.roles`."""

    mode: str
    k: Count


class EndEngine(Call, frozen=True):
    """The engine's roles are no longer needed."""


class OpenSlot(Call, frozen=True):
    """See `protocols.Target.open`, `protocols.Drafter.open`."""

    role: Role
    opening: SlotOpening


class SetPages(Call, frozen=True):
    """See `protocols.Drafter.set_pages`."""

    role: Role
    slot: Slot
    pages: Tokens


class PrefillChunk(Call, frozen=True):
    """See `protocols.Target.prefill`, `prefill_last` for the last chunk, and
    `protocols.Drafter.prefill`."""

    role: Role
    slot: Slot
    tokens: Tokens
    offset: Count
    last: bool


class Score(Call, frozen=True):
    """See `protocols.Target.score`."""

    slot: Slot
    tokens: Tokens


class Propose(Call, frozen=True):
    """See `protocols.Drafter.propose`; the arrays of its batch."""

    batch: list[np.ndarray]


class Forward(Call, frozen=True):
    """See `protocols.Target.forward`.

    Attributes:
      lengths: positions of the pending tokens.
      pending: None stands for the bonus tokens of the previous `accept`.
      proposed: L of each slot; None without a proposal.
      tokens: None stands for those of the drafter's proposal.
      accepts: whether the call goes on with `protocols.Target.accept`, of the drafter's proposal
        or, without a proposal, of none.
    """

    lengths: np.ndarray
    pending: np.ndarray | None
    proposed: np.ndarray | None
    tokens: np.ndarray | None
    accepts: bool


class Accept(Call, frozen=True):
    """See `protocols.Target.accept`, of the `forward` before."""

    proposal: list[np.ndarray]


def _array(_kind: type, value: Any) -> np.ndarray:
    array = msgspec.convert(value, PackedArray)
    return np.frombuffer(array.data, f"<{array.dtype}").reshape(array.shape)


_Slots = OpenSlot | SetPages | PrefillChunk | Score
_Calls = NewEngine | EndEngine | _Slots | Propose | Forward | Accept
_Setup = Greeting | Facts | Go | LeaderSettings | LoadReport
_Messages = _Setup | Refuse | End | SeenOutcome | _Calls
_DECODER = msgspec.msgpack.Decoder(_Messages, dec_hook=_array)
encode = msgspec.msgpack.Encoder(enc_hook=plain).encode
"""One message as bytes; arrays become a `PackedArray` of 32-bit integers or floats."""


def decode(frame: bytes) -> Any:
    """The message in bytes made by `encode`.

    Raises:
      OSError: the bytes are no message.
    """
    try:
        return _DECODER.decode(frame)
    except Exception as error:  # msgspec raises several kinds; each means garbage
        raise OSError(f"it has sent no message: {error}") from None
