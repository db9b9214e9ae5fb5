"""Texts with calls, parsed in pieces."""

from __future__ import annotations

from itertools import pairwise

from ssd_jax.server.tool_calls.forms import form_named
from ssd_jax.server.tool_calls.protocols import Arguments, CallBegin, Content

NAMES = frozenset({"f", "g"})


def parser(form, *, parallel=True):
    return form_named(form).parser(NAMES, parallel=parallel)


def joined(deltas):
    """The content, and the name and the arguments of each call."""
    content, calls = "", []
    for delta in deltas:
        match delta:
            case Content(text):
                content += text
            case CallBegin(name):
                calls.append((name, ""))
            case Arguments(text):
                name, arguments = calls.pop()
                calls.append((name, arguments + text))
    return content, calls


def parse(parser, text, cuts=()):
    """The joined deltas of a text that comes in pieces."""
    places = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    deltas = [delta for begin, end in pairwise(places) for delta in parser.push(text[begin:end])]
    return joined([*deltas, *parser.finish()])
