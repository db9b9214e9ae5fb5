"""The committed tokens of one request, and where they end."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from numbers import Integral

from ssd_jax.engine.grammar import TextGrammar
from ssd_jax.engine.request import FinishReason, LengthLimit, Request
from ssd_jax.errors import InputError
from ssd_jax.sampling.params import MAX_STOP_IDS


class Sequence:
    """Prompt and committed output of a request.

    `cached` alone decides what is valid: keys and values at or beyond that position are garbage,
    whatever a discarded forward wrote there.

    Attributes:
      to_prefill: number of tokens when it entered its slot.
      given: number of those tokens that the target was given.
      cached: positions whose keys and values are in the pages; the token at `cached` is pending.
      output: committed ids, with the stop id that ended them.
      finish_reason: None while running.
      limit: what ends it at the latest: `max_tokens`, or the context if that is reached before.
      grammar: its place in its grammar; None without one.
    """

    def __init__(self, request: Request, *, eos_ids: frozenset[int], context: int) -> None:
        self.request = request
        self.given = self.cached = 0
        self.output: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_ids = stop_ids(request, eos_ids)
        requested, available = request.params.most_tokens, context - len(request.prompt_ids)
        self._limit = min(requested, available)
        self.limit: LengthLimit = "max_tokens" if requested <= available else "context"
        self.to_prefill = len(request.prompt_ids)
        grammar = request.grammar
        self.grammar = None if grammar is None else TextGrammar(grammar, self.stop_ids)

    @property
    def text(self) -> list[int]:
        """Prompt and output."""
        return [*self.request.prompt_ids, *self.output]

    @property
    def size(self) -> int:
        """Number of tokens of prompt and output."""
        return len(self.request.prompt_ids) + len(self.output)

    @property
    def prefilled(self) -> bool:
        """Whether the target was given the `to_prefill` tokens."""
        return self.given >= self.to_prefill

    def prefill(self, end: int) -> None:
        """Records that the target was given the text up to `end`.

        If the text continues after a preemption, its last token runs again, as the pending one.
        """
        self.given = self.cached = end
        if self.prefilled and self.output:
            self.cached -= 1

    def rewind(self) -> None:
        """Starts over without pages: the whole text must be prefilled again."""
        self.given = self.cached = 0
        self.to_prefill = self.size

    @property
    def pending(self) -> int:
        """The last committed token, whose key and value are not in the pages yet."""
        return self.output[-1]

    @property
    def room(self) -> int:
        """Tokens that may still be committed."""
        return self._limit - len(self.output)

    def commit(self, tokens: Tokens[int]) -> list[int]:
        """Appends tokens up to and including the first stop; the stop is checked before the length.

        Returns: the tokens that were committed.
        """
        if self.finish_reason is not None:
            return []
        before, min_tokens = len(self.output), self.request.params.min_tokens
        committed = list(tokens[: self.room])
        if before + len(committed) >= self._limit:
            self.finish_reason = "length"
        for place, token in enumerate(committed):
            if token in self.stop_ids and before + place >= min_tokens:
                self.finish_reason = "stop"
                del committed[place + 1 :]
                break
        self.output += committed
        return committed


def check(request: Request, eos_ids: frozenset[int], context: int) -> None:
    """Refuses a request that cannot run.

    Raises:
      InputError: an empty prompt, a prompt that leaves no room in the context, too many stop ids,
        bad words without token ids, structured outputs without a grammar, an index out of range, or
        a priority that is no number.
    """
    is_integer = isinstance(request.index, Integral) and not isinstance(request.index, bool)
    if not is_integer or not 0 <= request.index < 2**32:
        raise InputError(f"index = {request.index!r} is out of range; give 0 to {2**32 - 1}")
    if not isinstance(request.priority, int):
        raise InputError(f"priority = {request.priority!r} is no integer; give one, such as 0")
    size = len(request.prompt_ids)
    if size == 0:
        raise InputError("the prompt is empty; give at least one token")
    if size >= context:
        raise InputError(
            f"the prompt has {size} tokens; the context is {context} and one is needed for output; "
            "shorten the prompt or raise `context` as far as the models reach"
        )
    if request.params.bad_words and not request.bad_word_ids:
        raise InputError("bad_words without their token ids; make the request with LLM.request")
    if (request.params.structured_outputs is None) is not (request.grammar is None):
        raise InputError(
            "structured_outputs without their compiled grammar, or one without them; make the "
            "request with LLM.request"
        )
    stops = len(stop_ids(request, eos_ids))
    if stops > MAX_STOP_IDS:
        raise InputError(f"{stops} stop ids, EOS included; at most {MAX_STOP_IDS} are supported")


def require_one_text(request: Request) -> None:
    """Refuses a request for several texts, which is to be split.

    Raises:
      InputError: `n` is more than 1.
    """
    if request.params.n > 1:
        raise InputError(
            f"n = {request.params.n} is for generate; stream and run take a request for each text"
        )


def stop_ids(request: Request, eos_ids: frozenset[int]) -> frozenset[int]:
    """Ids that end this request: its own, and every EOS id unless it ignores EOS."""
    ids = frozenset(request.params.stop_token_ids)
    return ids if request.params.ignore_eos else ids | eos_ids
