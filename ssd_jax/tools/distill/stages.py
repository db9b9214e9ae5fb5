"""The stages of a distillation, in order, each with a directory and a manifest of its own.

A stage that was begun is continued, one that is finished is not repeated, and neither is mixed with
results of other settings.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd_jax.checkpoints.shipped import draft_source
from ssd_jax.errors import InputError
from ssd_jax.system.atomic import clear_partial
from ssd_jax.tools.distill.completions import Bar, CompletionJob
from ssd_jax.tools.distill.generate import generate
from ssd_jax.tools.distill.magpie import SET, Written, read_turns, user_turn
from ssd_jax.tools.distill.manifest import (
    Manifest,
    check_same,
    file_digests,
    only_one,
    read_manifest,
    write_manifest,
)
from ssd_jax.tools.distill.prompt_settings import SPLITS
from ssd_jax.tools.distill.prompts import PromptFiles, PromptIds, read_prompts, write_prompts
from ssd_jax.tools.distill.prompts import report as counted
from ssd_jax.tools.distill.settings import DistillSettings, GenerateSettings, recorded
from ssd_jax.tools.distill.shards import read_shards
from ssd_jax.tools.distill.target import DistillTarget, digest, open_target

if TYPE_CHECKING:
    from ssd_jax.tools.bench.table import Page

_SECTIONS = {
    "magpie": ("target", "magpie"),
    "prompts": ("prompts",),
    "generate": ("target", "generate"),
    "train": ("train", "draft"),
    "evaluate": ("target", "evaluate"),
}
"""Sections of a configuration that a stage's results depend on."""


class Stopped(Exception):  # noqa: N818 (no error)
    """A stage ended early on request; the text says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation:
    """What every stage needs.

    Attributes:
      work: directory of all stages.
      draft: source of the draft to evaluate; None is the trained one.
      say, show: print a line of what was done, and a table of what was found.
    """

    settings: DistillSettings
    target: DistillTarget
    work: Path
    draft: str | None
    bar: Bar
    say: Callable[[str], None]
    show: Callable[[Page], None]

    @property
    def own(self) -> Path:
        """Directory of what belongs to this configuration's draft alone."""
        return self.work / self.settings.name

    def directory(self, stage: str) -> Path:
        """Where a stage keeps its files; drafts share the text, but not the training."""
        return (self.own if stage == "train" else self.work) / stage

    def plan(self, stage: str, inputs: dict[str, str]) -> Manifest:
        """The manifest of a stage made from the target and `inputs`: as it was left, or a new one.

        Raises:
          InputError: the configuration lacks a section of the stage, or the stage was begun with
            another target, other settings or other inputs.
        """
        sections = {name: getattr(self.settings, name) for name in _SECTIONS[stage]}
        missing = [f"[{name}]" for name in sorted(sections) if sections[name] is None]
        if missing:
            raise InputError(
                f"config {self.settings.name} has no {' and '.join(missing)}; stage {stage} needs "
                f"{'them' if len(missing) > 1 else 'it'}"
            )
        made_with: dict[str, Any] = {}
        for name, settings in sections.items():
            made_with |= recorded(name, settings)
        if stage == "evaluate":
            made_with["generate.slots"] = self.settings.generate.slots
        inputs = {"target": self.target.sha256, **inputs}
        planned = Manifest(stage=stage, settings=made_with, inputs=inputs)
        begun = read_manifest(self.directory(stage))
        if begun is None:
            return planned
        check_same(self.directory(stage), begun, planned)
        return begun

    def start(self, stage: str, inputs: dict[str, str]) -> Manifest:
        """Makes the directory of a stage; returns what `plan` does.

        The manifest is not written before there is something to continue: bad input binds no run.
        """
        manifest = self.plan(stage, inputs)
        self.directory(stage).mkdir(parents=True, exist_ok=True)
        return manifest

    def finished(self, stage: str, asker: str) -> Manifest:
        """The manifest of an earlier stage.

        Raises:
          InputError: it is not finished, or of another target.
        """
        manifest = read_manifest(self.directory(stage))
        if manifest is None or not manifest.finished:
            raise InputError(
                f"stage {asker} needs stage {stage}, which is not finished in {self.work}; run it "
                f"first, with --stage={stage} or without --stage"
            )
        same = dataclasses.replace(manifest, inputs={"target": self.target.sha256})
        check_same(self.directory(stage), manifest, same)
        return manifest

    def start_of_prompts(self, stage: str, split: str) -> tuple[Manifest, list[PromptIds]]:
        """The manifest of a stage that completes the prompts of a split, and the prompts."""
        sha256 = self.finished("prompts", stage).data["sha256"][split]
        manifest = self.start(stage, {"prompts": sha256})
        return manifest, read_prompts(self.directory("prompts"), split, sha256)

    def job(
        self, stage: str, settings: GenerateSettings, prompts: list[PromptIds]
    ) -> CompletionJob:
        """The job that completes the prompts of a stage."""
        return CompletionJob(
            target=self.settings.target,
            section=stage,
            settings=settings,
            prompts=prompts,
            vocabulary=self.target.checkpoint.tokenizer.size,
            limit=self.target.checkpoint.config.max_context,
            directory=self.directory(stage),
            bar=self.bar,
        )


def run(
    settings: DistillSettings,
    work: Path,
    *,
    stage: str | None = None,
    draft: str | None = None,
    bar: Bar,
    say: Callable[[str], None],
    show: Callable[[Page], None],
) -> None:
    """Runs one stage or, without one, all of them; see `Distillation`.

    Args:
      stage: one of `STAGES`.
      draft: as in `Distillation`, or one that comes with the package, as `Config.draft` has it.

    Raises:
      Stopped: a stage ended early, at a place from which it goes on.
      InputError: bad input, other settings than the ones a stage was begun with, or an earlier
        stage that is not finished; before anything that takes long.
    """
    chosen = _stages_of(settings, stage, draft)
    with bar("downloading", unit="bytes") as progress:
        target = open_target(settings.target.source, progress=progress)
    if draft is not None:
        draft = draft_source(draft, lambda: target.checkpoint)
    whole = Distillation(
        settings=settings, target=target, work=work, draft=draft, bar=bar, say=say, show=show
    )
    for name in chosen:
        _check_settings(whole, name)
    for name in chosen:
        directory = whole.directory(name).parent
        directory.mkdir(parents=True, exist_ok=True)
        # One process on prompts and text, and one a draft: drafts of a text can train at once.
        with only_one(directory):
            STAGES[name](whole)
            if name == "prompts" and "evaluate" in chosen:
                _text_to_judge(whole)[0].check()


def _stages_of(settings: DistillSettings, stage: str | None, draft: str | None) -> list[str]:
    """The given stage, or all whose sections the configuration has.

    Raises:
      InputError: the configuration has nothing for a stage, or no draft to evaluate is named.
    """
    name, trains = settings.name, bool(settings.prompts.train)
    if stage is None and not trains and settings.evaluate is not None and draft is None:
        raise InputError(
            f"config {name} evaluates drafts and trains none; say which one, with --draft=SOURCE "
            "or --draft=default"
        )
    possible = {
        "magpie": settings.magpie is not None,
        "prompts": True,
        "generate": trains,
        "train": settings.train is not None,
        "evaluate": settings.evaluate is not None and (settings.train or draft) is not None,
    }
    chosen = [one for one in STAGES if (possible[one] if stage is None else one == stage)]
    if draft is not None and "evaluate" not in chosen:
        raise InputError(
            f"draft = {draft!r} is for stage evaluate, which is not asked for; leave it out, or "
            "give --stage=evaluate and a configuration with [evaluate]"
        )
    if "generate" in chosen and not trains:
        raise InputError(f"config {name} lists no prompts to train on; stage generate needs them")
    return chosen


def _check_settings(whole: Distillation, name: str) -> None:
    """Refuses changed settings of a stage, and an impossible draft, before any stage runs."""
    settings = whole.settings
    whole.plan(name, {})
    tokenizer = whole.target.checkpoint.tokenizer
    if name == "prompts":
        files = PromptFiles(settings.prompts, settings.directory)
        written = read_manifest(whole.directory("magpie"))
        if settings.magpie is not None and not (written and written.finished):
            files.prepare(tokenizer)  # the target writes for long before the stage does it
    section, limit = getattr(settings, name), whole.target.checkpoint.config.max_context
    if getattr(section, "max_tokens", 0) >= limit:
        raise InputError(
            f"{name}.max_tokens = {section.max_tokens} leaves no room for a prompt in the {limit} "
            "positions that the target was made for; lower it"
        )
    top_n = settings.generate.top_n
    if name == "generate" and top_n > tokenizer.size:
        raise InputError(
            f"generate.top_n = {top_n} is more than the {tokenizer.size} tokens of the target; "
            "lower it"
        )
    if name == "train" and settings.train is not None and settings.draft is not None:
        from ssd_jax.tools.distill.training.loop import check

        check(settings.train, settings.draft, whole.target.checkpoint)
    if name == "evaluate" and whole.draft is not None:
        from ssd_jax.tools.distill.evaluate import open_pair

        open_pair(settings.target, whole.draft)


def _magpie(whole: Distillation) -> None:
    settings = whole.settings.magpie
    assert settings is not None
    prefix = user_turn(whole.target.checkpoint.tokenizer).before
    job = whole.job("magpie", settings, [PromptIds(set=SET, index=0, ids=prefix)])
    data = generate(job, whole.start("magpie", {})).data
    whole.say(f"magpie: {data['completions']} turns of {data['generated']} tokens")


def _prompts(whole: Distillation) -> None:
    files = PromptFiles(whole.settings.prompts, whole.settings.directory)
    inputs, written = files.digests(), list[Written]()
    if whole.settings.magpie is not None:
        inputs["magpie"] = _texts_digest(whole.finished("magpie", "prompts"))
        samples = read_shards(whole.directory("magpie"), target=whole.target.sha256)
        written = read_turns(samples, whole.target.checkpoint.tokenizer)
    manifest, directory = whole.start("prompts", inputs), whole.directory("prompts")
    if manifest.finished:
        with contextlib.suppress(InputError):
            for split in SPLITS:
                read_prompts(directory, split, manifest.data["sha256"][split])
            whole.say(f"prompts, made before:\n{counted(manifest.data['counts'])}")
            return
    clear_partial(directory)
    prompts, counts = files.prepare(whole.target.checkpoint.tokenizer, written)
    data = {"counts": counts, "sha256": write_prompts(directory, prompts)}
    write_manifest(directory, dataclasses.replace(manifest, finished=True, data=data))
    whole.say(f"prompts:\n{counted(counts)}")


def _generate(whole: Distillation) -> None:
    manifest, prompts = whole.start_of_prompts("generate", "train")
    data = generate(whole.job("generate", whole.settings.generate, prompts), manifest).data
    whole.say(
        f"generate: {data['completions']} completions, {data['generated']} tokens to learn of "
        f"{data['tokens']}, in {data['planned']} shards of {whole.directory('generate')}"
    )


def _train(whole: Distillation) -> None:
    texts = _texts_digest(whole.finished("generate", "train"))
    manifest = whole.start("train", {"generate": texts})
    directory, train, draft = whole.directory("train"), whole.settings.train, whole.settings.draft
    assert train is not None
    assert draft is not None
    from ssd_jax.tools.distill.training.model import open_beginning

    begun = open_beginning(draft, whole.target.checkpoint)
    beginning = begun and begun.digest and begun.digest()
    known = manifest.data.get("begin") == beginning and manifest.data.get("store") == draft.store
    if manifest.finished and known:
        made = directory / manifest.data["draft"]
        if file_digests(made) == manifest.data.get("files"):
            whole.say(f"train, made before: {made}")
            return
    clear_partial(directory)
    from ssd_jax.tools.distill.training.journal import picture_of
    from ssd_jax.tools.distill.training.loop import run as train_draft

    with whole.bar("training", unit="steps") as progress:
        result = train_draft(
            train,
            draft,
            target=whole.target.checkpoint,
            samples=read_shards(whole.directory("generate"), target=whole.target.sha256),
            work=directory,
            progress=progress,
            saved=lambda: write_manifest(directory, manifest),
        )
    data = {
        "step": result.step,
        "store": draft.store,
        "held_out": result.held_out,
        "draft": result.draft.name,
        "begin": beginning,
        "files": file_digests(result.draft),
    }
    finished = not result.stopped
    write_manifest(directory, dataclasses.replace(manifest, finished=finished, data=data))
    whole.say(f"train: step {result.step} of {train.steps}; the draft is {result.draft}")
    if missing := picture_of(directory):
        whole.say(missing)
    if not finished:
        raise Stopped(result.stopped)


def _evaluate(whole: Distillation) -> None:
    from ssd_jax.tools.distill import evaluate
    from ssd_jax.tools.distill.evaluation_table import evaluation_tables

    draft, path = whole.draft, whole.own / "evaluation.json"
    if draft is None:
        trained = read_manifest(whole.directory("train"))
        if trained is None or "draft" not in trained.data:
            raise InputError(
                f"stage evaluate needs a draft, and stage train has made none in {whole.own}; run "
                "it first, or give --draft=PATH"
            )
        draft = str(whole.directory("train") / trained.data["draft"])
    else:
        place = Path(draft).expanduser()
        known_as = str(place.resolve()) if place.exists() else draft
        path = path.with_stem(f"{path.stem}-{digest([known_as])[:12]}")
    settings = whole.settings.evaluate
    assert settings is not None
    job, manifest = _text_to_judge(whole)
    written = generate(job, manifest, evaluate.plan_texts(job))
    path.parent.mkdir(parents=True, exist_ok=True)
    document = evaluate.evaluate(settings, draft, job=job, manifest=written, path=path)
    for table in evaluation_tables(document):
        whole.show(table)
    whole.say(f"evaluate: {path}")


def _text_to_judge(whole: Distillation) -> tuple[CompletionJob, Manifest]:
    """The job of the text that stage evaluate judges drafts by, and the stage's manifest."""
    from ssd_jax.tools.distill import evaluate

    manifest, held_out = whole.start_of_prompts("evaluate", "held_out")
    settings = whole.settings.evaluate
    assert settings is not None
    text = GenerateSettings(
        max_tokens=settings.max_tokens,
        temperatures=tuple(evaluate.TEMPERATURES.values()),
        seed=settings.seed,
        slots=whole.settings.generate.slots,
        top_n=0,
    )
    return whole.job("evaluate", text, evaluate.choose(held_out, settings)), manifest


def _texts_digest(manifest: Manifest) -> str:
    """Digest of the texts and scores that a stage has generated."""
    shards = manifest.data["shards"]
    files = [[shard["sha256"], shard["scores"] and shard["scores"]["sha256"]] for shard in shards]
    return digest(files)


STAGES = {
    "magpie": _magpie,
    "prompts": _prompts,
    "generate": _generate,
    "train": _train,
    "evaluate": _evaluate,
}
