"""The process that renders a chat template, which is untrusted code: Jinja in an immutable sandbox,
with limits of memory and processor time. It imports nothing but Jinja, and ends with the other end
of its socket.

Source: the environment of `transformers.utils.chat_template_utils` (extensions, filters, globals).

A request is the JSON of
[template, variables, which include the messages]; an answer begins with a byte, 0 for a text and 1
for an error, both UTF-8.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    import jinja2
    from jinja2.parser import Parser

_LONGEST_ERROR = 500


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; rendering keeps its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def parse(self, parser: Parser) -> nodes.Node:
        """The node of a block: its body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def environment() -> jinja2.Environment:
    """The environment that published chat templates are written for."""
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    jinja.filters["tojson"] = _to_json
    jinja.globals["raise_exception"] = _raise_exception
    jinja.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return jinja


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """JSON without the HTML escapes of Jinja's own filter, which chat templates do not want."""
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _limit_memory(max_bytes: int) -> None:
    """Limits memory; where the system has no such limit, only that of time holds."""
    for kind, limit in ((resource.RLIMIT_DATA, max_bytes), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))


def _render(request: bytes, compile_template, max_text: int) -> tuple[int, bytes]:
    """The first byte of an answer, and the rest."""
    try:
        source, variables = json.loads(request)
        text = compile_template(source).render(variables)
        if len(text) > max_text:
            return 1, f"it wrote more than {max_text >> 20} MB".encode()
        return 0, text.encode("utf-8", "surrogatepass")
    except MemoryError:
        return 1, b"it took too much memory"
    except Exception as error:  # the template is the checkpoint's code: anything may be raised
        text = " ".join(str(error).split()) or type(error).__name__
        return 1, text[:_LONGEST_ERROR].encode("utf-8", "replace")


def main() -> None:
    """Answers requests; the arguments are the limits (bytes of memory, seconds of processor time a
    request, characters of an answer) and the socket's number."""
    memory, seconds, max_text = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    connection = Connection(int(sys.argv[4]))
    compile_template = functools.lru_cache(maxsize=1)(environment().from_string)
    _limit_memory(memory)
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError, OSError):  # the other end is closed
        while True:
            request = connection.recv_bytes()
            # The signal's default action ends the process, even inside a long C call.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            status, rest = _render(request, compile_template, max_text)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(bytes([status]) + rest)


if __name__ == "__main__":
    main()
