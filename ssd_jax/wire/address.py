"""Where a worker listens."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple, Self

from ssd_jax.errors import InputError

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/\s]+):(\d{1,5})")


class Address(NamedTuple):
    """A host, by name or IP address, and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, setting: str, *, any_port: bool = False) -> Self:
        """Reads HOST:PORT; an IPv6 address is in brackets.

        Args:
          setting: its name, for messages.
          any_port: allows port 0, which stands for any free port.

        Raises:
          InputError: the text is not an address.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None or not (not any_port) <= int(match[2]) < 2**16:
            raise InputError(
                f"{setting} = {text!r} is no address; give HOST:PORT, such as 10.0.0.7:4711 or "
                "[fd00::7]:4711"
            )
        return cls(match[1].strip("[]"), int(match[2]))

    @property
    def loopback(self) -> bool:
        """Whether only this host can be reached at this address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
