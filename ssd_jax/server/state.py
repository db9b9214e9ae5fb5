"""What all routes share."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from ssd_jax.sampling.params import SamplingParams
from ssd_jax.server.admission import Admission
from ssd_jax.server.engine_access import EngineAccess
from ssd_jax.server.errors import ApiError
from ssd_jax.server.metrics import Metrics

if TYPE_CHECKING:
    from ssd_jax.llm.llm import LLM

_RETRY = 5  # seconds


@dataclasses.dataclass(kw_only=True)
class ServerState:
    """One server.

    Attributes:
      model: the name that requests give.
      max_body: bytes of a body.
      loaded: whether the model can decode.
      draining: whether the server is about to end, and takes no more requests.
    """

    model: str
    engine: EngineAccess
    admission: Admission
    metrics: Metrics
    max_body: int
    loaded: bool = False
    draining: bool = False
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def why_not_ready(self) -> str | None:
        """Why requests are not taken; None if they are."""
        if self.engine.failure is not None:
            return self.engine.failure
        if self.draining:
            return "the server is about to end"
        return None if self.loaded else "the model is loading"

    def require_ready(self) -> None:
        """Refuses a request that cannot be decoded now.

        Raises:
          ApiError: with the reason.
        """
        reason = self.why_not_ready
        if reason is not None:
            raise ApiError(503, f"{reason}; try again later", code="not_ready", retry_after=_RETRY)

    def require_model(self, model: str) -> None:
        """Refuses a model that is not served.

        Raises:
          ApiError: with the name of the one that is.
        """
        if model != self.model:
            raise ApiError(
                404,
                f"model {model!r} is not served here; this is {self.model!r}, and there are no "
                "adapters",
                "model",
                "model_not_found",
            )


def new_state(
    llm: LLM, defaults: SamplingParams, *, model: str, queue: int, max_body: int
) -> ServerState:
    """The state of a server for a model, which may load later.

    Args:
      defaults: sampling parameters of requests that give none.
      model: the name that requests give.
      queue: texts that may wait for a slot.
      max_body: bytes of a body.
    """
    engine = EngineAccess(llm, defaults)
    admission = Admission(engine.slots, queue)
    return ServerState(
        model=model,
        engine=engine,
        admission=admission,
        metrics=Metrics(admission, model),
        max_body=max_body,
    )
