"""How two ends prove to each other that they know a secret, which neither of them sends.

The end that listens sends its hello; the other one answers by its own and a proof; the first one
ends by its proof, or by why it refuses. A hello has the version of the protocol and 32 random
bytes; a proof is an HMAC of both hellos, so that nothing that was overheard is of use again.
"""

from __future__ import annotations

import hmac
import secrets

from ssd_jax.wire.frames import Frames

VERSION = 16
"""Version of everything that two processes say to each other; both ends must have the same."""
MAX_FRAME = 2**10
"""Most bytes of a frame before the proofs."""
_MAGIC = b"SSD"
_HELLO_SIZE = len(_MAGIC) + 1 + 32  # bytes
_ACCEPT, _REFUSE = b"\1", b"\0"
_CLIENT, _SERVER = b"client", b"server"


class RefusedError(Exception):
    """One end does not want the other.

    Args:
      kind: a word for the reason, by which logs tell refusals apart.
    """

    def __init__(self, reason: str, kind: str = "refused") -> None:
        super().__init__(reason)
        self.kind = kind


def hello() -> bytes:
    """A new hello."""
    return _MAGIC + bytes([VERSION]) + secrets.token_bytes(_HELLO_SIZE - len(_MAGIC) - 1)


def admit(secret: bytes, server_hello: bytes, answer: bytes) -> bytes:
    """What the end that listens says last to who has answered its hello.

    Raises:
      RefusedError: the other end has another version or secret; `refusal` tells it so.
    """
    _check_version(answer)
    client_hello, proof = answer[:_HELLO_SIZE], answer[_HELLO_SIZE:]
    if not hmac.compare_digest(proof, _proof(secret, _CLIENT, server_hello + client_hello)):
        raise RefusedError("it does not know the token", "token")
    return _ACCEPT + _proof(secret, _SERVER, server_hello + client_hello)


def refusal(error: RefusedError) -> bytes:
    """What the end that listens says last to who is refused."""
    return _REFUSE + ("its token is another" if error.kind == "token" else str(error)).encode()


def enter(frames: Frames, secret: bytes, seconds: float) -> None:
    """Proves this end's secret to the end that listens, and checks that it knows it, too.

    Args:
      seconds: how long each of its frames may take.

    Raises:
      RefusedError: one end refuses the other.
      OSError: the other end does not answer.
    """
    server_hello = frames.receive_first(seconds, max_bytes=MAX_FRAME)
    client_hello = hello()
    frames.send(client_hello + _proof(secret, _CLIENT, server_hello + client_hello))
    _check_version(server_hello)  # so that both ends tell of it
    verdict = frames.receive_first(seconds, max_bytes=MAX_FRAME)
    if verdict[:1] == _REFUSE:
        raise RefusedError(verdict[1:].decode(errors="replace"))
    if not hmac.compare_digest(
        verdict, _ACCEPT + _proof(secret, _SERVER, server_hello + client_hello)
    ):
        raise RefusedError("it does not know the token itself")


def _proof(secret: bytes, end: bytes, hellos: bytes) -> bytes:
    return hmac.digest(secret, end + hellos, "sha256")


def _check_version(hello: bytes) -> None:
    if hello[: len(_MAGIC)] != _MAGIC or len(hello) < _HELLO_SIZE:
        raise RefusedError("it speaks another protocol", "protocol")
    version = hello[len(_MAGIC)]
    if version != VERSION:
        raise RefusedError(
            f"version {version} of the protocol, and version {VERSION} here; install the same "
            "ssd_jax at both ends",
            "version",
        )
