"""The process that renders a chat template, which is a stranger's program: Jinja in an immutable
sandbox, with limits of memory and processor time. It imports nothing but Jinja, and ends with its
standard input.

Source: the environment of `transformers.utils.chat_template_utils` (extensions, filters, globals).

Messages are a length, 8 bytes little-endian, and that many bytes. A request is the JSON of
[template, special tokens, messages, whether to add the generation prompt]; an answer begins with a
byte, 0 for a text and 1 for an error, both UTF-8.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import resource
import signal
import sys
from typing import TYPE_CHECKING

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    import jinja2
    from jinja2.parser import Parser

_LENGTH_BYTES = 8
_LONGEST_ERROR = 500


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is kept."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def parse(self, parser: Parser) -> nodes.Node:
        """See `Extension.parse`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def environment() -> jinja2.Environment:
    """The environment that published chat templates are written for."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own filter escapes HTML characters, which chat templates do not want."""
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _limit_memory(most: int) -> None:
    """Where the system has no such limits, that of time holds alone."""
    for kind, limit in ((resource.RLIMIT_DATA, most), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))


def _render(request: bytes, compiled, most_text: int) -> tuple[int, bytes]:
    """An answer's first byte and the rest of it."""
    try:
        source, special_tokens, messages, prompted = json.loads(request)
        text = compiled(source).render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=prompted,
            **special_tokens,
        )
        if len(text) > most_text:
            return 1, f"it wrote more than {most_text >> 20} MB".encode()
        return 0, text.encode("utf-8", "surrogatepass")
    except MemoryError:
        return 1, b"it took too much memory"
    except Exception as error:  # the template is the checkpoint's code: anything may be raised
        text = " ".join(str(error).split()) or type(error).__name__
        return 1, text[:_LONGEST_ERROR].encode("utf-8", "replace")


def main() -> None:
    """Answers requests; the arguments are the bytes of memory, the seconds of processor time a
    request, and the characters of an answer."""
    memory, seconds, most_text = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    compiled = functools.lru_cache(maxsize=1)(environment().from_string)
    read, write = sys.stdin.buffer, sys.stdout.buffer
    _limit_memory(memory)
    write.write(b"\0" * _LENGTH_BYTES)  # ready
    write.flush()
    while len(length := read.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
        request = read.read(int.from_bytes(length, "little"))
        # The signal's default action ends the process, inside a long C call too.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        status, rest = _render(request, compiled, most_text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write.write((1 + len(rest)).to_bytes(_LENGTH_BYTES, "little") + bytes([status]) + rest)
        write.flush()


if __name__ == "__main__":
    main()
