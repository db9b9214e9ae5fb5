"""The setting `hosts`: which processes run the target together."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Self

from ssd_jax.errors import InputError
from ssd_jax.wire.address import Address

_MAX_PORT = 2**16  # ports


@dataclasses.dataclass(frozen=True)
class Hosts:
    """What the setting says of the processes.

    Attributes:
      address: HOST:PORT of the leader, where JAX's coordinator listens; None if JAX is to find out
        this, `count` and `index` by itself.
      count: number of processes, including the leader.
      index: index of this process; the leader's is 0.
      stream: port of the leader's streams to followers; 0 takes a free one.
      joining: seconds that this process waits for the others at the start.
    """

    address: str | None
    count: int = 0
    index: int = 0
    stream: int = 0
    joining: int = 300

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a setting such as "10.0.0.1:4000,count=2,index=1" or "auto".

        Raises:
          InputError: the text is not such a setting.
        """
        address_text, *options = (option.strip() for option in text.split(","))
        numbers: dict[str, int] = {}
        for option in options:
            match = re.fullmatch(r"(count|index|stream|joining)=([0-9]{1,5})", option)
            if match is None or match[1] in numbers:
                raise _malformed(text)
            numbers[match[1]] = int(match[2])
        address = None if address_text == "auto" else address_text
        if address is not None:
            try:
                Address.parse(address, "hosts")
            except InputError:
                raise _malformed(text) from None
        if {*numbers} - {"stream", "joining"} if address is None else "count" not in numbers:
            raise _malformed(text)
        hosts = cls(address, **numbers)
        if hosts.stream >= _MAX_PORT:
            raise InputError(f"hosts = {text!r}: there is no port {hosts.stream}")
        if not hosts.joining:
            raise InputError(f"hosts = {text!r}: joining is seconds, 1 or more")
        if address and not hosts.count:
            raise InputError(f"hosts = {text!r}: count is processes, 1 or more")
        if address and not hosts.index < hosts.count:
            raise InputError(
                f"hosts = {text!r}: index is 0 for the leader and at most {hosts.count - 1} of "
                f"{hosts.count} processes"
            )
        return hosts

    @property
    def jax_arguments(self) -> dict[str, Any]:
        """Arguments of `jax.distributed.initialize`."""
        if self.address is None:
            return {}
        return {
            "coordinator_address": self.address,
            "num_processes": self.count,
            "process_id": self.index,
            "cluster_detection_method": "deactivate",
        }


def _malformed(text: str) -> InputError:
    return InputError(
        f"hosts = {text!r} is not understood; give the leader's address and how many processes "
        "there are, such as 10.0.0.1:4000,count=2, with index=1 for a follower, or auto"
    )
