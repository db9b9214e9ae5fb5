"""One answer from the engine, which can be stopped."""

from __future__ import annotations

from collections.abc import Callable

from ssd_jax.runtime.engine import Engine
from ssd_jax.runtime.request import Request, RequestOutput


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
