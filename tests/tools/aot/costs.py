"""Modes of a pair whose programs take given seconds."""

from ssd_jax.tools.aot.chips import Chip, Roofline
from ssd_jax.tools.aot.modes import Mode
from ssd_jax.tools.aot.parts import Compiled, ModelPart
from ssd_jax.tools.aot.programs import Sizes
from ssd_jax.tools.aot.traffic import ProgramWork

CHIP = Chip(slices={}, memory=1000, bandwidth=1.0, flops=1.0, link=1.0)
SIZES = Sizes(slots=2, context=64, k=4, branches=16)
TARGET = {"forward 0": 8.0, "forward 4": 9.0, "accept 2 0 sampled": 0.5, "accept 2 4 sampled": 1.0}
DRAFT = {"start 4 sampled": 1.5, "step 4 sampled": 1.0, "promote 4": 0.1}
TREES = {"forward_tree": 9.5, "accept_tree sampled": 1.25}
GROWTH = {"begin_tree sampled": 1.75, "grow_tree sampled": 1.1}
TREE_BRANCHES = {
    "promote_tree": 0.3,
    "adopt_tree": 0.2,
    "expand_tree sampled": 2.4,
    "grow_branches sampled": 1.3,
}
BRANCHES = {"expand 4 sampled": 2.0, "grow 4 sampled": 1.2}


def part(role, devices, seconds, *, other_buffers=5, code=0, **changes):
    """Of programs that take so many seconds."""

    def compiled(seconds):
        bounds = Roofline(memory=seconds, arithmetic=0.0, permutes=0.0, links=0.0)
        sizes = {"other_buffers": other_buffers - 5, "temporaries": 5, "code": code}
        return Compiled(work=ProgramWork(0, 0, 0, ()), bounds=bounds, seconds=1.0, **sizes)

    def name(text):
        return tuple(int(word) if word.isdigit() else word for word in text.split())

    programs = {name(text): compiled(second) for text, second in seconds.items()}
    about = {"weights": 100, "pages": 10, "programs": programs} | changes
    return ModelPart(role=role, devices=tuple(range(devices)), **about)


AR = Mode(name="ar", target=part("target", 8, TARGET))
SD = Mode(name="sd", target=AR.target, draft=part("draft", 8, DRAFT))
SSD = Mode(name="ssd", target=part("target", 4, TARGET), draft=part("draft", 4, DRAFT | BRANCHES))
