"""A target, and perhaps a draft, with weights and compiled programs: what engines are made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from ssd_jax.config import SUPPORT, Config
from ssd_jax.opened import OpenedModel
from ssd_jax.runtime.branch_draft import BranchDraft
from ssd_jax.runtime.controller import Controller
from ssd_jax.runtime.draft_programs import Drafting, DraftPrograms
from ssd_jax.runtime.exactness import costs_nothing, widths_agree
from ssd_jax.runtime.expansion_programs import ExpansionPrograms
from ssd_jax.runtime.model_drafter import ModelDrafter
from ssd_jax.runtime.ngram_drafter import NgramDrafter
from ssd_jax.runtime.programs import Programs, Verification
from ssd_jax.runtime.roles import Drafter
from ssd_jax.runtime.target import DeviceTarget
from ssd_jax.weights.progress import Progress


@dataclasses.dataclass(frozen=True)
class Roles:
    """The two roles of one engine."""

    target: DeviceTarget
    drafter: Drafter | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """Programs and parameters, shared by every engine.

    Attributes:
      expansion_programs: of mode ssd.
      exact: the exactness that holds, "bitwise" or "law".
    """

    config: Config
    programs: Programs
    parameters: list[jax.Array]
    draft_programs: DraftPrograms | None
    expansion_programs: ExpansionPrograms | None
    draft_parameters: list[jax.Array]
    tokens: int
    exact: str

    def roles(self, mode: str, k: int) -> Roles:
        """New roles with empty slots for a mode, with up to k proposed tokens a round."""
        target = DeviceTarget(self.programs, self.parameters)
        return Roles(target, None if mode == "ar" else self._drafter(mode, k))

    def _drafter(self, mode: str, k: int) -> Drafter:
        config, parameters = self.config, self.draft_parameters
        if mode == "ssd":
            assert self.expansion_programs is not None
            draft = BranchDraft(
                self.expansion_programs, parameters, temperature=config.draft_temperature
            )
            return Controller(
                draft,
                k=k,
                budget=config.branches,
                fan_out=lambda: config.fan_out_of(k),
                backup=config.host_backup,
                tokens=self.tokens,
                longer=k == 1,  # else every branch of k = L would be empty
            )
        if self.draft_programs is None:
            return NgramDrafter(config.slots, k, self.programs.verification.widths[-1])
        return ModelDrafter(
            self.draft_programs, parameters, k=k, temperature=config.draft_temperature
        )


def load(
    config: Config,
    target: OpenedModel,
    draft: OpenedModel | None,
    context: int,
    *,
    ks: Sequence[int],
    progress: Progress | None,
) -> Loaded:
    """Compiles all programs while the weights load.

    Args:
      config: settings.
      target, draft: opened models.
      context: most positions of a sequence.
      ks: numbers of proposed tokens to prepare for; empty without a draft.
      progress: of the target's weights.

    Raises:
      InputError: tensor data that cannot be read.
    """
    support = _support(config, target, draft)
    room = {"slots": config.slots, "context": context, "tokens": target.tokenizer.size}
    with ThreadPoolExecutor(1) as pool:
        parameters = pool.submit(target.load, progress)
        draft_parameters = pool.submit(draft.load) if draft is not None else None
        programs = Programs(
            target.model,
            **room,
            verification=Verification(
                widths=tuple(sorted({0, *ks})),
                support=1 if draft is None or config.verify == "coupled" else support,
                rule=config.verify,
                logprobs=config.logprobs,
                logprobs_of=config.logprobs_of,
            ),
        )
        draft_programs = expansion_programs = None
        if draft is not None:
            drafting = Drafting(
                k=max(ks),
                support=support,
                rule=config.verify,
                branches=config.branches,
                saguaro_c=1.0 if config.saguaro_c is None else config.saguaro_c,
            )
            draft_programs = DraftPrograms(draft.model, **room, drafting=drafting)
            if config.mode == "ssd":
                expansion_programs = ExpansionPrograms(draft_programs)
        loaded = parameters.result()
        draft_loaded = draft_parameters.result() if draft_parameters is not None else []
    return Loaded(
        config=config,
        programs=programs,
        parameters=loaded,
        draft_programs=draft_programs,
        expansion_programs=expansion_programs,
        draft_parameters=draft_loaded,
        tokens=target.tokenizer.size,
        exact=_exactness(config, programs, loaded),
    )


def _support(config: Config, target: OpenedModel, draft: OpenedModel | None) -> int:
    """Ids that a proposal's q keeps: no more than either model embeds."""
    most = min(m.model.config.vocab_size for m in (target, draft) if m is not None)
    if config.proposal_support == "full":
        return most
    return min(SUPPORT if config.proposal_support is None else int(config.proposal_support), most)


def _exactness(config: Config, programs: Programs, parameters: list[jax.Array]) -> str:
    """The exactness that holds; where widths disagree, bitwise runs all at the widest."""
    bitwise = config.exact == "bitwise"
    if not bitwise and (config.exact == "law" or not costs_nothing(programs.model.execution)):
        return "law"
    if len(programs.widths) > 1 and not widths_agree(programs, parameters):
        if not bitwise:
            return "law"
        programs.use_widest()
    return "bitwise"
