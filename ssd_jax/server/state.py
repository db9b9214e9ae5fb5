"""What all routes share."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ssd_jax.sampling.params import SamplingParams
from ssd_jax.server.admission import Admission
from ssd_jax.server.engine_access import EngineAccess
from ssd_jax.server.errors import ApiError
from ssd_jax.server.metrics import Metrics
from ssd_jax.server.options import ServerOptions
from ssd_jax.system.files import shown

if TYPE_CHECKING:
    from ssd_jax.llm.llm import LLM

_RETRY = 5  # seconds


@dataclasses.dataclass(kw_only=True)
class ServerState:
    """One server.

    Attributes:
      loaded: whether the model can decode.
      draining: whether the server is about to end, and takes no more requests.
      connections: gives the number of those that are open.
    """

    options: ServerOptions
    engine: EngineAccess
    admission: Admission
    metrics: Metrics
    loaded: bool = False
    draining: bool = False
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    connections: Callable[[], int] = lambda: 0

    @property
    def model(self) -> str:
        """The name that requests give."""
        return self.options.model

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

    def require_model(self, model: str | None) -> None:
        """Refuses a model that is not served.

        Args:
          model: as a request names it; None or an empty name is the model that is served.

        Raises:
          ApiError: with the name of the one that is.
        """
        if model and model != self.model:
            raise ApiError(
                404,
                f"model {shown(model)} is not served here; this is {self.model!r}, and there are "
                "no adapters",
                "model",
                "model_not_found",
            )


def new_state(llm: LLM, defaults: SamplingParams, options: ServerOptions) -> ServerState:
    """The state of a server for a model, which may load later.

    Args:
      defaults: sampling parameters of requests that give none.
    """
    engine = EngineAccess(llm, defaults)
    admission = Admission(engine.slots, options.queue)
    metrics = Metrics(admission, options.model, engine.activity)
    return ServerState(options=options, engine=engine, admission=admission, metrics=metrics)
