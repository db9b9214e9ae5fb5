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

from ssd_jax.checkpoints.drafts.shipped import draft_source
from ssd_jax.errors import InputError
from ssd_jax.system.atomic import clear_partial
from ssd_jax.tools.distill.completions import Bar, CompletionJob
from ssd_jax.tools.distill.generate import generate
from ssd_jax.tools.distill.magpie import SET, GeneratedTurn, read_turns, user_turn
from ssd_jax.tools.distill.manifest import (
    Manifest,
    check_same,
    file_digests,
    lock_directory,
    read_manifest,
    write_manifest,
)
from ssd_jax.tools.distill.prompt_ids import PromptIds, read_prompts, write_prompts
from ssd_jax.tools.distill.prompt_settings import SPLITS
from ssd_jax.tools.distill.prompts import PromptFiles, describe_counts
from ssd_jax.tools.distill.settings import DistillSettings, GenerateSettings, determining_values
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
    def draft_directory(self) -> Path:
        """Directory of what belongs to this configuration's draft alone."""
        return self.work / self.settings.name

    def directory(self, stage: str) -> Path:
        """Where a stage keeps its files; drafts share the text, but not the training."""
        return (self.draft_directory if stage == "train" else self.work) / stage

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
            made_with |= determining_values(name, settings)
        if stage == "evaluate":
            made_with["generate.slots"] = self.settings.generate.slots
        inputs = {"target": self.target.sha256, **inputs}
        planned = Manifest(stage=stage, settings=made_with, inputs=inputs)
        earlier = read_manifest(self.directory(stage))
        if earlier is None:
            return planned
        check_same(self.directory(stage), earlier, planned)
        return earlier

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
    stages = _stages_of(settings, stage, draft)
    with bar("downloading", unit="bytes") as progress:
        target = open_target(settings.target.source, progress=progress)
    if draft is not None:
        draft = draft_source(draft, lambda: target.checkpoint)
    context = Distillation(
        settings=settings, target=target, work=work, draft=draft, bar=bar, say=say, show=show
    )
    for name in stages:
        _check_settings(context, name)
    for name in stages:
        directory = context.directory(name).parent
        directory.mkdir(parents=True, exist_ok=True)
        # One process on prompts and text, and one a draft: drafts of a text can train at once.
        with lock_directory(directory):
            STAGES[name](context)
            if name == "prompts" and "evaluate" in stages:
                _text_to_judge(context)[0].check()


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
    stages = [name for name in STAGES if (possible[name] if stage is None else name == stage)]
    if draft is not None and "evaluate" not in stages:
        raise InputError(
            f"draft = {draft!r} is for stage evaluate, which is not asked for; leave it out, or "
            "give --stage=evaluate and a configuration with [evaluate]"
        )
    if "generate" in stages and not trains:
        raise InputError(f"config {name} lists no prompts to train on; stage generate needs them")
    return stages


def _check_settings(context: Distillation, name: str) -> None:
    """Refuses changed settings of a stage, and an impossible draft, before any stage runs."""
    settings = context.settings
    context.plan(name, {})
    tokenizer = context.target.checkpoint.tokenizer
    if name == "prompts":
        files = PromptFiles(settings.prompts, settings.directory)
        magpie = read_manifest(context.directory("magpie"))
        if settings.magpie is not None and not (magpie and magpie.finished):
            files.prepare(tokenizer)  # the target writes for long before the stage does it
    section, limit = getattr(settings, name), context.target.checkpoint.config.max_context
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

        check(settings.train, settings.draft, context.target.checkpoint)
    if name == "evaluate" and context.draft is not None:
        from ssd_jax.tools.distill.evaluate import open_pair

        open_pair(settings.target, context.draft)


def _magpie(context: Distillation) -> None:
    settings = context.settings.magpie
    assert settings is not None
    prefix = user_turn(context.target.checkpoint.tokenizer).prefix
    job = context.job("magpie", settings, [PromptIds(set=SET, index=0, ids=prefix)])
    data = generate(job, context.start("magpie", {})).data
    context.say(f"magpie: {data['completions']} turns of {data['generated']} tokens")


def _prompts(context: Distillation) -> None:
    files = PromptFiles(context.settings.prompts, context.settings.directory)
    inputs, turns = files.digests(), list[GeneratedTurn]()
    if context.settings.magpie is not None:
        inputs["magpie"] = _texts_digest(context.finished("magpie", "prompts"))
        samples = read_shards(context.directory("magpie"), target=context.target.sha256)
        turns = read_turns(samples, context.target.checkpoint.tokenizer)
    manifest, directory = context.start("prompts", inputs), context.directory("prompts")
    if manifest.finished:
        with contextlib.suppress(InputError):
            for split in SPLITS:
                read_prompts(directory, split, manifest.data["sha256"][split])
            context.say(f"prompts, made before:\n{describe_counts(manifest.data['counts'])}")
            return
    clear_partial(directory)
    prompts, counts = files.prepare(context.target.checkpoint.tokenizer, turns)
    data = {"counts": counts, "sha256": write_prompts(directory, prompts)}
    write_manifest(directory, dataclasses.replace(manifest, finished=True, data=data))
    context.say(f"prompts:\n{describe_counts(counts)}")


def _generate(context: Distillation) -> None:
    manifest, prompts = context.start_of_prompts("generate", "train")
    data = generate(context.job("generate", context.settings.generate, prompts), manifest).data
    context.say(
        f"generate: {data['completions']} completions, {data['generated']} tokens to learn of "
        f"{data['tokens']}, in {data['planned']} shards of {context.directory('generate')}"
    )


def _train(context: Distillation) -> None:
    texts = _texts_digest(context.finished("generate", "train"))
    manifest = context.start("train", {"generate": texts})
    directory = context.directory("train")
    train = context.settings.train
    draft = context.settings.draft
    assert train is not None
    assert draft is not None
    from ssd_jax.tools.distill.training.model import open_beginning

    first_checkpoint = open_beginning(draft, context.target.checkpoint)
    first_digest = first_checkpoint and first_checkpoint.digest and first_checkpoint.digest()
    unchanged = (
        manifest.data.get("begin") == first_digest and manifest.data.get("store") == draft.store
    )
    if manifest.finished and unchanged:
        draft_path = directory / manifest.data["draft"]
        if file_digests(draft_path) == manifest.data.get("files"):
            context.say(f"train, made before: {draft_path}")
            return
    clear_partial(directory)
    from ssd_jax.tools.distill.training.journal import write_picture
    from ssd_jax.tools.distill.training.loop import run as train_draft

    with context.bar("training", unit="steps") as progress:
        result = train_draft(
            train,
            draft,
            target=context.target.checkpoint,
            samples=read_shards(context.directory("generate"), target=context.target.sha256),
            work=directory,
            progress=progress,
            on_save=lambda: write_manifest(directory, manifest),
        )
    data = {
        "step": result.step,
        "store": draft.store,
        "held_out": result.held_out,
        "draft": result.draft.name,
        "begin": first_digest,
        "files": file_digests(result.draft),
    }
    finished = not result.stop_reason
    write_manifest(directory, dataclasses.replace(manifest, finished=finished, data=data))
    context.say(f"train: step {result.step} of {train.steps}; the draft is {result.draft}")
    if missing := write_picture(directory):
        context.say(missing)
    if not finished:
        raise Stopped(result.stop_reason)


def _evaluate(context: Distillation) -> None:
    from ssd_jax.tools.distill import evaluate
    from ssd_jax.tools.distill.evaluation_table import evaluation_tables

    draft, path = context.draft, context.draft_directory / "evaluation.json"
    if draft is None:
        training = read_manifest(context.directory("train"))
        if training is None or "draft" not in training.data:
            raise InputError(
                f"stage evaluate needs a draft, and stage train has made none in "
                f"{context.draft_directory}; run it first, or give --draft=PATH"
            )
        draft = str(context.directory("train") / training.data["draft"])
    else:
        draft_path = Path(draft).expanduser()
        draft_name = str(draft_path.resolve()) if draft_path.exists() else draft
        path = path.with_stem(f"{path.stem}-{digest([draft_name])[:12]}")
    settings = context.settings.evaluate
    assert settings is not None
    job, manifest = _text_to_judge(context)
    texts = generate(job, manifest, evaluate.plan_texts(job))
    path.parent.mkdir(parents=True, exist_ok=True)
    document = evaluate.evaluate(settings, draft, job=job, manifest=texts, path=path)
    for table in evaluation_tables(document):
        context.show(table)
    context.say(f"evaluate: {path}")


def _text_to_judge(context: Distillation) -> tuple[CompletionJob, Manifest]:
    """The job of the text that stage evaluate judges drafts by, and the stage's manifest."""
    from ssd_jax.tools.distill import evaluate

    manifest, held_out = context.start_of_prompts("evaluate", "held_out")
    settings = context.settings.evaluate
    assert settings is not None
    text = GenerateSettings(
        max_tokens=settings.max_tokens,
        temperatures=tuple(evaluate.TEMPERATURES.values()),
        seed=settings.seed,
        slots=context.settings.generate.slots,
        top_n=0,
    )
    return context.job("evaluate", text, evaluate.choose(held_out, settings)), manifest


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
