"""A target on the host whose pages slots share."""

from __future__ import annotations

from ssd_jax.testing.fakes import FakeTarget

SIZE, CONTEXT, K = 4, 64, 3
LONG = "".join(chr(97 + index % 26) for index in range(50))


class Paged(FakeTarget):
    """Writes to pages that the slot has, which are no other's; `memory` is what it has written.

    With a `window`, a token reads as many positions, its own included.
    """

    def __init__(self, *args, window=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.memory, self._window = {}, window

    def _first_read(self, at):
        return 0 if self._window is None else max(at + 1 - self._window, 0)

    def _place(self, slot, at):
        return self.pages[slot][at // SIZE], at % SIZE

    def prefill(self, slot, tokens, offset):
        super().prefill(slot, tokens, offset)
        for at, token in enumerate(tokens, offset):
            if at < self._reused[slot]:
                assert self.memory[self._place(slot, at)] == token, "another text is reused"
            self.memory[self._place(slot, at)] = token

    def forward(self, tokens, lengths, drafted=None):
        live = [slot for slot, length in enumerate(lengths) if length >= 0]
        held = [
            page
            for slot in live
            for page in self.pages[slot][
                max(self._reused[slot], self._first_read(lengths[slot])) // SIZE :
            ]
        ]
        assert len(held) == len({*held}), "two slots write to one page"
        for slot in live:
            last = lengths[slot] + (0 if drafted is None else drafted.lengths[slot])
            assert last < len(self.pages[slot]) * SIZE, "a token is written to no page"
            first = self._first_read(lengths[slot])
            read = [self.memory[self._place(slot, at)] for at in range(first, lengths[slot])]
            assert read == self._pages[slot][first : lengths[slot]], "what is read is another's"
            self.memory[self._place(slot, lengths[slot])] = int(tokens[slot])
            for at in range(lengths[slot] + 1, last + 1):
                self.memory[self._place(slot, at)] = drafted.tokens[slot][at - lengths[slot] - 1]
        return super().forward(tokens, lengths, drafted)
