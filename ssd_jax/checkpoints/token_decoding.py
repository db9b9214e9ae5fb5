"""Token ids to text, one token at a time, for every kind of tokenizer.

Byte-level and sentencepiece tokens each stand for fixed bytes, so their text is those bytes read as
UTF-8: an incremental decoder gives it in constant time a token. Any other decoder is run over a
sliding window of recent tokens.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import tokenizers

SPACE_MARK = "\u2581"  # sentencepiece writes a space as this character
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TextStream(Protocol):
    """Text of a growing sequence of token ids; what was returned is never taken back."""

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that `ids` complete; never part of a character."""
        ...

    def flush(self) -> str:
        """Return what was held back, an unfinished character as U+FFFD."""
        ...


class ByteStream:
    """The stream of a tokenizer whose tokens stand for fixed bytes.

    Bytes that are no UTF-8 become U+FFFD, one for each maximal invalid part, as Rust and Python do.
    """

    def __init__(self, piece: Callable[[int], bytes], *, strip_space: bool) -> None:
        """`piece` gives a token's bytes; `strip_space` drops one space at the start of the text."""
        self._piece = piece
        self._strip_space = strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that `ids` complete; never part of a character."""
        data = b"".join(map(self._piece, ids))
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Return an unfinished character as U+FFFD, or nothing."""
        return self._utf8.decode(b"", final=True)


class WindowStream:
    """The stream of a tokenizer whose decoder looks at neighbouring tokens.

    The new text is the decoded window minus its decoded beginning. The window starts one step
    before the unreturned tokens, and moves on whenever its text ends in a complete character.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """`decode` turns a list of token ids into text."""
        self._decode = decode
        self._window: list[int] = []
        self._returned = 0  # tokens of the window whose text was returned

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that `ids` complete; never part of a character."""
        return "".join(map(self._push, ids))

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        new = self._new_text()
        if not new or new.endswith("\ufffd"):
            return ""
        self._advance()
        return new

    def flush(self) -> str:
        """Return the text that was held back."""
        new = self._new_text()
        self._advance()
        return new

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._returned])
        return self._decode(self._window)[len(before) :]

    def _advance(self) -> None:
        self._window = self._window[self._returned :]
        self._returned = len(self._window)


def stream_opener(backend: tokenizers.Tokenizer) -> Callable[[], TextStream]:
    """Return what opens a stream for this tokenizer, chosen by its decoder."""
    decoder = backend.decoder
    description: dict[str, Any] = {} if decoder is None else json.loads(decoder.__getstate__())
    if description.get("type") == "ByteLevel":
        piece = _byte_level_piece(backend)
        return lambda: ByteStream(piece, strip_space=False)
    steps = description.get("decoders", [])
    if _is_sentencepiece(steps):
        piece = _sentencepiece_piece(backend)
        return lambda: ByteStream(piece, strip_space=len(steps) == 4)
    return lambda: WindowStream(lambda ids: backend.decode(ids, skip_special_tokens=False))


def _is_sentencepiece(steps: list[dict]) -> bool:
    """Whether a decoder sequence is Llama's: marks to spaces, byte tokens to bytes, maybe Strip."""
    replace = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    llama = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return steps in (llama, [*llama, strip])


def _byte_level_piece(backend: tokenizers.Tokenizer) -> Callable[[int], bytes]:
    """Bytes of a token in GPT-2's byte alphabet; added tokens are plain text."""
    byte_of = {char: byte for byte, char in _byte_alphabet().items()}
    added = backend.get_added_tokens_decoder()

    @functools.cache
    def piece(token_id: int) -> bytes:
        token = backend.id_to_token(token_id)
        if token is None:  # a padding row
            return b""
        if token_id in added or not byte_of.keys() >= set(token):
            return token.encode()
        return bytes(byte_of[char] for char in token)

    return piece


def _sentencepiece_piece(backend: tokenizers.Tokenizer) -> Callable[[int], bytes]:
    """Bytes of a sentencepiece token: `<0x0A>` is a byte, the mark is a space."""

    @functools.cache
    def piece(token_id: int) -> bytes:
        token = backend.id_to_token(token_id)
        if token is None:  # a padding row
            return b""
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace(SPACE_MARK, " ").encode()

    return piece


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's character for each byte: printable Latin-1 is itself, the rest starts at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet)
    return alphabet | {byte: chr(0x100 + rank) for rank, byte in enumerate(others)}
