"""Turns committed tokens into streamed text that never shows part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ssd_jax.checkpoints.tokenizers.detokenizer import DecodeStream, OpenStream
    from ssd_jax.engine.request import Request


class Released(NamedTuple):
    """Tokens and text that no later stop string can take back.

    Attributes:
      ends: where the text of each token ends in `text`.
    """

    token_ids: list[int]
    text: str
    stopped: bool
    ends: list[int]

    def followed_by(self, rest: Released) -> Released:
        """What both release, in this order."""
        ends = [len(self.text) + end for end in rest.ends]
        ids = self.token_ids + rest.token_ids
        return Released(ids, self.text + rest.text, rest.stopped, self.ends + ends)


class TextStream:
    """The text of one request.

    Text that may begin a stop string is held back with its tokens. When a stop string is found, the
    text is cut before it, and the tokens after the one that reaches the cut are dropped, but none
    of the first `min_tokens`: decoding the kept ids gives the text, or the text and the rest of its
    last token.

    Args:
      include_stop: cut behind the stop string instead, hold nothing back, and show a stop id.

    Attributes:
      stop: the stop string that has ended the text; None while there is none.
    """

    def __init__(
        self,
        decoder: DecodeStream,
        stops: Sequence[str],
        min_tokens: int,
        *,
        include_stop: bool = False,
    ) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self.stop: str | None = None
        self._text = ""  # all text so far
        self._ends: list[int] = []  # length of the text after each token
        self._ids: list[int] = []
        self._sent_ids = 0
        self._sent_text = 0
        self._searchable = 0  # a stop string may not begin before this

    def push(self, ids: Sequence[int], *, stop_last: bool = False) -> Released:
        """Adds committed ids; with `stop_last` the last one is a stop id."""
        for index, token in enumerate(ids):
            hidden = stop_last and index == len(ids) - 1 and not self._include_stop
            piece = self._decoder.flush() if hidden else self._decoder.push([token])
            if self._add(token, piece):
                return self._release(len(self._text), len(self._ids), stopped=True)
        safe = len(self._text) - self._held_back()
        ready = self._sent_ids
        while ready < len(self._ids) and self._ends[ready] <= safe:
            ready += 1
        # A last token without text may be the first bytes of a character that is still to come.
        while ready > self._sent_ids and self._ends[ready - 1] == self._begin(ready - 1):
            ready -= 1
        return self._release(safe, ready, stopped=False)

    def finish(self) -> Released:
        """Releases what was held back, for a request that ended without a stop string."""
        stopped = bool(self._ids) and self._add(None, self._decoder.flush())
        return self._release(len(self._text), len(self._ids), stopped=stopped)

    def cut(self) -> Released:
        """Releases what was held back, for a request that is cut off.

        An incomplete last character is no text: it is left out, and so are last tokens that hold
        nothing else.
        """
        try:
            rest = self._decoder.flush()
        except Exception:  # may be the reason why it is cut off
            rest = "\ufffd"
        complete = rest.rstrip("\ufffd")
        if self._ids and self._add(None, complete):
            return self._release(len(self._text), len(self._ids), stopped=True)
        last = len(self._ids)
        if complete != rest:
            while last > self._sent_ids and self._ends[last - 1] == self._begin(last - 1):
                last -= 1
        return self._release(len(self._text), last, stopped=False)

    @property
    def text(self) -> str:
        """All text released so far."""
        return self._text[: self._sent_text]

    @property
    def token_ids(self) -> list[int]:
        """All ids released so far."""
        return self._ids[: self._sent_ids]

    def _add(self, token: int | None, piece: str) -> bool:
        """Appends a piece of text; on a stop string, cuts text and ids and returns True."""
        self._text += piece
        if token is not None:
            self._ids.append(token)
            self._ends.append(len(self._text))
        elif self._ends:
            self._ends[-1] = len(self._text)
        if len(self._ids) <= self._min_tokens:
            self._searchable = len(self._text)
            return False
        places = [(self._find(stop, len(piece)), len(stop), stop) for stop in self._stops]
        matches = [place for place in places if place[0] >= 0]
        if not matches:
            return False
        cut, size, self.stop = min(matches)
        if self._include_stop:
            cut += size
        self._text = self._text[:cut]
        count = min(self._min_tokens, len(self._ids))
        while count < len(self._ids) and self._begin(count) < cut:
            count += 1
        del self._ids[count:], self._ends[count:]
        return True

    def _begin(self, index: int) -> int:
        """Length of the text before a token."""
        return self._ends[index - 1] if index else 0

    def _find(self, stop: str, new: int) -> int:
        begin = max(self._searchable, len(self._text) - new - len(stop) + 1, 0)
        return self._text.find(stop, begin)

    def _held_back(self) -> int:
        """Length of the longest suffix of the text that begins a stop string."""
        if self._include_stop:
            return 0
        tail = self._text[max(self._searchable, self._sent_text) :]
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(tail)), 0, -1):
            if any(stop.startswith(tail[-size:]) for stop in self._stops):
                return size
        return 0

    def _release(self, text_end: int, ids_end: int, *, stopped: bool) -> Released:
        ids, text = self._ids[self._sent_ids : ids_end], self._text[self._sent_text : text_end]
        begin, ends = self._sent_text, self._ends[self._sent_ids : ids_end]
        self._sent_ids, self._sent_text = ids_end, max(text_end, self._sent_text)
        return Released(ids, text, stopped, [min(max(e - begin, 0), len(text)) for e in ends])


def open_text(request: Request, decoder: OpenStream) -> TextStream:
    """The text of a request, which begins after its prompt."""
    params = request.params
    return TextStream(
        decoder(
            request.prompt_ids[-1],
            skip_special=params.skip_special_tokens,
            visible_ids=request.visible_ids,
        ),
        params.stop,
        params.min_tokens,
        include_stop=params.include_stop_str_in_output,
    )
