"""Messages between leader and followers, as msgpack; types define what a message may be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from ssd_jax.roles.records import SlotOpening
from ssd_jax.sampling.params import Extra
from ssd_jax.wire.codec import to_plain
from ssd_jax.wire.fields import Count, Number, PackedArray

Slot = Annotated[int, Meta(ge=0, lt=2**20)]
Tokens = list[Count]


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


class LoadExtra(HostMessage, frozen=True):
    """From the leader: see `Loaded.load_extra`.

    A follower makes calls meanwhile, and answers by `Facts`.
    """

    extra: Extra


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


Role = Literal["engine", "target", "drafter"]
Array = np.ndarray
_SLOT_CALLS: dict[str, Any] = {
    "open": tuple[SlotOpening],
    "set_pages": tuple[Slot, Tokens],
}
CALLS: dict[str, dict[str, Any]] = {
    "engine": {"make": tuple[str, Count], "end": tuple[()]},
    "target": _SLOT_CALLS
    | {
        "prefill": tuple[Slot, Tokens, Count],
        "prefill_last": tuple[Slot, Tokens, Count, Array | None],
        "score": tuple[Slot, Tokens],
        "forward": tuple[Array | None, Array, Array | None, Array | None, Array | None],
        "read_tokens": tuple[()],
        "accept": tuple[list[Array] | None, bool, Array | None],
    },
    "drafter": _SLOT_CALLS
    | {"prefill": tuple[Slot, Tokens, Count, bool], "propose": tuple[list[Array]]},
}
"""Types of the arguments of all that a leader may call, by role and method.

Those of `protocols.Target` and `protocols.Drafter` have their arguments, with four exceptions.
What a follower has itself is not sent:

- "forward": pending tokens, None for the bonus tokens of the last `accept`; lengths; the number of
  proposed tokens, None without a proposal; these, None for those of the last `propose`; their
  parents, None for those of the last `propose` and for chains.
- "read_tokens", of the last `propose`: none.
- "accept", of the logits of the last `forward`: the arrays of a `Proposal`, None without one;
  whether it is the drafter's instead; and the masks.
- "propose": the arrays of a `DraftBatch`.

"make" makes an engine's roles for a mode and K, "end" gives them up.
"""


class Call(HostMessage, frozen=True):
    """From the leader: a call of an engine's role, which the leader makes at the same time.

    Attributes:
      history: checksum of all calls before this one; a follower that has made others has erred.
      engine: number of the engine.
      arguments: see `CALLS`.
    """

    history: int
    engine: Count
    role: Role
    method: str
    arguments: Any


def _array(_kind: type, value: Any) -> np.ndarray:
    packed = msgspec.convert(value, PackedArray)
    return np.frombuffer(packed.data, f"<{packed.dtype}").reshape(packed.shape)


_Setup = Greeting | Facts | Go | LeaderSettings | LoadExtra
_Messages = _Setup | Refuse | End | SeenOutcome | Call
_DECODER = msgspec.msgpack.Decoder(_Messages, dec_hook=_array)
encode = msgspec.msgpack.Encoder(enc_hook=to_plain).encode
"""One message as bytes; arrays become a `PackedArray` of 32-bit integers or floats."""


def decode(frame: bytes) -> Any:
    """The message in bytes made by `encode`.

    Raises:
      OSError: the bytes are no message.
    """
    try:
        message = _DECODER.decode(frame)
        if isinstance(message, Call):
            types = CALLS[message.role][message.method]
            arguments = msgspec.convert(message.arguments, types, dec_hook=_array)
            message = msgspec.structs.replace(message, arguments=arguments)
        return message
    except Exception as error:  # msgspec raises several kinds; each means garbage
        raise OSError(f"it has sent no message: {error}") from None
