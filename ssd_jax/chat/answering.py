"""One answer from the engine, which Ctrl-C can stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from ssd_jax.runtime.engine import Engine
from ssd_jax.runtime.request import Request, RequestOutput


class Interrupts:
    """Ctrl-C as a wish that is looked at when there is time: an exception amid a round would leave
    the engine between two states, and anywhere else end the program.

    Attributes:
      seen: whether Ctrl-C was pressed since this was last set to False.
    """

    def __init__(self) -> None:
        self.seen = False
        self._raising = False

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes Ctrl-C in `seen`."""
        before = signal.signal(signal.SIGINT, self._pressed)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Within `noted`: raises KeyboardInterrupt, for a wait at the prompt."""
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    def _pressed(self, _number: int, _frame: FrameType | None) -> None:
        if self._raising:
            raise KeyboardInterrupt
        self.seen = True


def answer(
    engine: Engine,
    request: Request,
    *,
    on_text: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> RequestOutput:
    """Runs a request to its end, alone in the engine.

    The engine is stepped here, not through `LLM.run`, to look for a stop between the chunks of a
    long prefill, which have no event, and to have the output of a stopped request too.

    Args:
      on_text: called with each new piece of text; never half a character.
      stopped: asked before each round; True cancels the request.
    """
    request_id = engine.add(request)
    while True:
        if stopped():
            engine.cancel(request_id)
        for event in engine.step():
            if event.text:
                on_text(event.text)
            if event.output is not None:
                return event.output
