"""What leader and followers say to each other, as msgpack: types say what a message may be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from ssd_jax.placement.process.codec import plain
from ssd_jax.placement.process.messages import Count, Number, PackedArray
from ssd_jax.roles.records import SlotOpening

VERSION = 3
Slot = Annotated[int, Meta(ge=0, lt=2**20)]
Tokens = list[Count]
Role = Literal["target", "drafter"]


class HostMessage(
    msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True
):
    """Anything that is sent."""


class Greeting(HostMessage, frozen=True):
    """A follower's first: it knows the secret of the job, and is this process of it."""

    version: Count
    token: str
    index: Count
    name: str


class Facts(HostMessage, frozen=True):
    """A follower's: what must be the same on all hosts, by name. It waits for a `Go`."""

    values: dict[str, str]


class Go(HostMessage, frozen=True):
    """The leader's: all hosts have told the same facts."""


class LeaderSettings(HostMessage, frozen=True):
    """The leader's: fields of its `Config`, and numbers of proposed tokens to prepare for."""

    config: dict[str, Any]
    ks: list[int]


class Refuse(HostMessage, frozen=True):
    """Why nobody goes on: a follower's goes to the leader, the leader's to all."""

    why: str
    status: int = 1


class End(HostMessage, frozen=True):
    """The leader's: it needs nothing more."""


class SeenOutcome(HostMessage, frozen=True):
    """A follower's: what the outcome of a call was to it, as a checksum."""

    call: Number
    outcome: int


class Call(HostMessage, frozen=True):
    """The leader's: a call of an engine's role, which it makes itself at the same time.

    Attributes:
      before: checksum of all calls before this one; a follower that has made others has erred.
      engine: whose role it is.
    """

    before: int
    engine: Count


class NewEngine(Call, frozen=True):
    """New roles, see `Loaded.roles`."""

    mode: str
    k: Count


class EndEngine(Call, frozen=True):
    """Its roles are not needed any more."""


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
    """See `protocols.Target.prefill`, and `prefill_last` where it is the last, and
    `protocols.Drafter.prefill`."""

    role: Role
    slot: Slot
    tokens: Tokens
    offset: Count
    last: bool


class Propose(Call, frozen=True):
    """See `protocols.Drafter.propose`; the arrays of its batch."""

    batch: list[np.ndarray]


class Forward(Call, frozen=True):
    """See `protocols.Target.forward`.

    Attributes:
      lengths: positions of the pending tokens.
      pending: None stands for the bonus tokens of the `accept` before.
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


_Calls = NewEngine | EndEngine | OpenSlot | SetPages | PrefillChunk | Propose | Forward | Accept
_Messages = Greeting | Facts | Go | LeaderSettings | Refuse | End | SeenOutcome | _Calls
_DECODER = msgspec.msgpack.Decoder(_Messages, dec_hook=_array)
encode = msgspec.msgpack.Encoder(enc_hook=plain).encode
"""One message as bytes; arrays go as a `PackedArray`, integers and floats in 32 bits."""


def decode(frame: bytes) -> Any:
    """The message that `encode` made these bytes of.

    Raises:
      OSError: there is none.
    """
    try:
        return _DECODER.decode(frame)
    except Exception as error:  # msgspec raises some kinds; each means garbage
        raise OSError(f"it has sent no message: {error}") from None
