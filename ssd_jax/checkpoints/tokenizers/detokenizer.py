"""Token ids to text, one token at a time, for every kind of tokenizer.

Byte-level and sentencepiece tokens stand for fixed bytes, so their text is these bytes read as
UTF-8, which an incremental decoder does in constant time a token. Any other decoder runs over a
sliding window of recent tokens.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Collection, Container, Iterable
from typing import Any, Protocol

import tokenizers
from typing_extensions import override

SPACE_MARK = "\u2581"  # sentencepiece writes a space as this character
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class DecodeStream(Protocol):
    """Text of a growing sequence of token ids; returned text is never taken back.

    All pushed text followed by `flush()` is the same however the ids are cut into pushes. The cost
    of a push does not grow with the length of the sequence.
    """

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; never part of a character."""
        ...

    def flush(self) -> str:
        """The text held back; an unfinished character becomes U+FFFD."""
        ...


class OpenStream(Protocol):
    """Opens a stream for a text after a token, `Tokenizer.open_stream`."""

    def __call__(
        self, after: int, /, *, skip_special: bool, visible_ids: Collection[int]
    ) -> DecodeStream:
        """A stream for a text after a token; arguments as of `Tokenizer.open_stream`."""
        ...


class ByteStream(DecodeStream):
    """The `DecodeStream` of a tokenizer whose tokens stand for fixed bytes.

    Bytes that are no UTF-8 become U+FFFD, one for each maximal invalid part, as Rust and Python do.

    Args:
      bytes_of: returns a token's bytes.
      skipped_ids: tokens that are not text.
      strip_space: whether to drop one space at the start of the text.
    """

    def __init__(
        self, bytes_of: Callable[[int], bytes], skipped_ids: Container[int], *, strip_space: bool
    ) -> None:
        self._bytes_of, self._skipped_ids = bytes_of, skipped_ids
        self._strip_space = strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @override
    def push(self, ids: Iterable[int]) -> str:
        data = b"".join(
            self._bytes_of(token_id) for token_id in ids if token_id not in self._skipped_ids
        )
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._utf8.decode(data)

    @override
    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowStream(DecodeStream):
    """The `DecodeStream` of a tokenizer whose decoder looks at neighbouring tokens.

    The new text is the decoded window minus its decoded beginning. The window starts one step
    before the unreturned tokens, and moves on whenever its text ends in a complete character.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        skipped_ids: Container[int] = (),
        after: int | None = None,
    ) -> None:
        self._decode, self._skipped_ids = decode, skipped_ids
        self._window = [] if after is None else [after]
        self._returned = len(self._window)  # tokens of the window whose text was returned

    @override
    def push(self, ids: Iterable[int]) -> str:
        return "".join(
            self._push(token_id) for token_id in ids if token_id not in self._skipped_ids
        )

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        new = self._new_text()
        return self._advance(new) if new and not new.endswith("\ufffd") else ""

    @override
    def flush(self) -> str:
        return self._advance(self._new_text())

    def _new_text(self) -> str:
        returned_text = self._decode(self._window[: self._returned])
        return self._decode(self._window)[len(returned_text) :]

    def _advance(self, new: str) -> str:
        self._window = self._window[self._returned :]
        self._returned = len(self._window)
        return new


def stream_opener(
    backend: tokenizers.Tokenizer,
) -> Callable[[Container[int], int | None], DecodeStream]:
    """A function that opens a stream for this tokenizer, chosen by its decoder. Its arguments are
    the skipped tokens, and the token that the text follows, None at its beginning."""
    bytes_of = byte_reader(backend)
    if bytes_of is None:
        decode = functools.partial(backend.decode, skip_special_tokens=False)
        return functools.partial(WindowStream, decode)
    strips_space = len(_decoder_of(backend).get("decoders", [])) == 4
    return lambda skipped_ids, after: ByteStream(
        bytes_of, skipped_ids, strip_space=strips_space and after is None
    )


def byte_reader(backend: tokenizers.Tokenizer) -> Callable[[int], bytes] | None:
    """A function that returns the bytes of a token; None where tokens have none of their own."""
    description = _decoder_of(backend)
    if description.get("type") == "ByteLevel":
        to_bytes = _from_byte_level(backend)
    elif _is_sentencepiece(description.get("decoders", [])):
        to_bytes = _from_sentencepiece
    else:
        return None

    @functools.cache
    def bytes_of(token_id: int) -> bytes:
        token = backend.id_to_token(token_id)
        return b"" if token is None else to_bytes(token_id, token)  # None: a padding row

    return bytes_of


def _decoder_of(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """The decoder's description; empty if there is none."""
    return {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())


def _is_sentencepiece(steps: list[dict]) -> bool:
    """Whether a decoder sequence is Llama's: marks to spaces, byte tokens to bytes, maybe Strip."""
    replace = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    llama = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return steps in (llama, [*llama, strip])


def _from_sentencepiece(_token_id: int, token: str) -> bytes:
    """`<0x0A>` is a byte, the mark is a space."""
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(byte[1])
    return token.replace(SPACE_MARK, " ").encode()


def _from_byte_level(backend: tokenizers.Tokenizer) -> Callable[[int, str], bytes]:
    """Reads GPT-2's byte alphabet: printable Latin-1 is itself, other bytes start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(0x100 + rank): byte for rank, byte in enumerate(others)}
    added = backend.get_added_tokens_decoder()

    def to_bytes(token_id: int, token: str) -> bytes:
        if token_id in added or not byte_of.keys() >= set(token):  # plain text
            return token.encode()
        return bytes(byte_of[char] for char in token)

    return to_bytes
