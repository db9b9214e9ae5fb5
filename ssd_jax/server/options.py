"""What a server is set to: names, limits, keys and certificates."""

from __future__ import annotations

import dataclasses
import re
import ssl
from collections.abc import Sequence
from pathlib import Path

from ssd_jax.errors import InputError
from ssd_jax.server.tool_calls.protocols import CallForm
from ssd_jax.system.paths import require_writable, user_path
from ssd_jax.system.secret_files import read_secrets
from ssd_jax.wire.security import Files, Names

TLS_NAMES = Names("", "", "ssl_certfile", "ssl_keyfile")
"""As uvicorn and vLLM name them."""
STANDARD_OUTPUT = "-"
"""The access log that is written to standard output."""
_ORIGIN = re.compile(r"\*|https?://[^/\s*]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Settings of one server.

    Attributes:
      model: the name that requests give.
      tool_parser: the form of tool calls; None is that of the chat template.
      queue: texts that may wait for a slot.
      max_body: most bytes of a request's body.
      most_connections: open at a time; requests on further ones are refused. None is any number.
      request_timeout: most seconds that a request may take; None is any number.
      keys: one of them must come with a request; with none everybody may ask.
      origins: of web pages that may ask from a browser; "*" is any.
      access_log: file that gets a line a request, or `STANDARD_OUTPUT`; None is no log.
      logs_texts: whether these lines have prompts and texts.
      tls: certificate and key; None serves plain HTTP.
    """

    model: str
    tool_parser: CallForm | None = None
    queue: int = 256
    max_body: int = 8 << 20
    most_connections: int | None = None
    request_timeout: float | None = None
    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    access_log: str | None = None
    logs_texts: bool = False
    tls: ssl.SSLContext | None = None


def read_keys(path: str | None) -> tuple[str, ...]:
    """The keys in the file of `--api_key_file`; none without a file.

    Raises:
      InputError: the file cannot be read, others can read it, or it has no keys.
    """
    return () if path is None else read_secrets(path, "api_key_file")


def read_tls(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """The certificate and the key of `--ssl_certfile` and `--ssl_keyfile`; None without files.

    Raises:
      InputError: one is missing, cannot be read, or does not belong to the other.
    """
    if (certificate is None) != (key is None):
        raise InputError("ssl_certfile and ssl_keyfile go together; give both or neither")
    return Files(cert=certificate, key=key).serving_context(TLS_NAMES)


def check_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """The origins of `--allowed_origins`.

    Raises:
      InputError: one that no browser sends.
    """
    for origin in origins:
        if _ORIGIN.fullmatch(origin) is None:
            raise InputError(
                f"allowed_origins: {origin!r} is no origin; give such as https://example.org or "
                "http://localhost:3000, without a path, or * for any"
            )
    return tuple(origins)


def check_access_log(path: str | None, *, logs_texts: bool) -> str | None:
    """The file of `--access_log`, absolute.

    Raises:
      InputError: it cannot be written, or texts are to be logged in no file.
    """
    if path is None:
        if logs_texts:
            raise InputError("access_log_texts is for an access log; give --access_log, too")
        return None
    if path == STANDARD_OUTPUT:
        return path
    file = user_path(path).absolute()
    if file.is_dir() or not file.parent.is_dir():
        raise InputError(f"access_log = {path!r} is no file in a directory that exists; give one")
    require_writable("access_log", Path(file))
    return str(file)
