"""Encryption of a connection, apart from its socket."""

from __future__ import annotations

import ssl
import threading


class Tls:
    """One end's TLS: turns bytes that are to be sent into others, and received ones back.

    OpenSSL allows one thread at a time for a connection. Here that is only while bytes are turned,
    so one thread can send while another waits for what comes.

    Args:
      name: host that the other end's certificate must be for; None if this end serves.

    Attributes:
      ready: whether both ends have agreed.
    """

    def __init__(self, context: ssl.SSLContext, name: str | None = None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=name is None, server_hostname=name
        )
        self._lock = threading.Lock()
        self.ready = False

    def decrypt(self, data: bytes) -> bytes:
        """Takes received bytes; returns what the other end has sent by them.

        Until `ready`, `encrypt(b"")` then has this end's part of the agreement, or why there is
        none.

        Raises:
          ssl.SSLError: the other end is not who it should be, or speaks no TLS.
        """
        plain = bytearray()
        with self._lock:
            self._incoming.write(data)
            try:
                if not self.ready:
                    self._tls.do_handshake()
                    self.ready = True
                while part := self._tls.read(2**16):
                    plain += part
            except ssl.SSLWantReadError:
                pass
        return bytes(plain)

    def encrypt(self, data: bytes) -> bytes:
        """The bytes to send for `data`."""
        with self._lock:
            if data:
                self._tls.write(data)
            return self._outgoing.read()
