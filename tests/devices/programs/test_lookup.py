"""Programs of an earlier start: found by all that they depend on, the same in every bit, and never
needed."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax import LLM
from ssd_jax.devices.branches.expansion_programs import ExpansionPrograms
from ssd_jax.devices.draft.programs import DraftPrograms
from ssd_jax.devices.programs import lookup
from ssd_jax.devices.programs.paged import Paging
from ssd_jax.devices.programs.program_spec import ProgramSpec
from ssd_jax.devices.target.base import Verification
from ssd_jax.devices.target.programs import Programs
from ssd_jax.devices.trees.draft_programs import TreeDraftPrograms
from ssd_jax.devices.trees.expansion_programs import TreeExpansionPrograms
from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.mechanisms import Experts
from ssd_jax.models.sharding import DATA_AXIS, TENSOR_AXIS
from ssd_jax.roles.drafting import Drafting, TreeShape
from ssd_jax.system import stored_jit
from ssd_jax.system.compile_cache import ProgramStore, use_store
from ssd_jax.testing import tiny
from tests.checkpoints import tiny_pair
from tests.llm.runs import outputs, requests
from tests.placement.meshes import SHAPE
from tests.system.stored import key_of

CONFIG = ModelConfig.from_hf(tiny.config("llama"))
EXECUTION = Execution.for_platform("cpu", "float32")


def cache_keys(make, *arguments, **changes):
    """Of the programs that a constructor would compile, by name."""
    seen = {}

    def compiler(specs, *_):
        seen.update({name: spec.cache_key for name, spec in specs.items()})
        return {}

    make(*arguments, compiler=compiler, **changes)
    assert all(seen.values())
    return seen


def reduced(ids):
    config = dataclasses.replace(CONFIG, output_size=len(ids), tie_embeddings=False)
    return FunctionalModel(config, EXECUTION, output_ids=np.array(ids, np.int32))


MODEL = {"config": CONFIG, "execution": EXECUTION}
MODELS = {
    "config": [dataclasses.replace(CONFIG, rms_norm_eps=1e-6)],
    "execution": [
        Execution.for_platform("cpu", "bfloat16"),
        dataclasses.replace(EXECUTION, scan_layers=True),
    ],
    "mesh": [
        jax.make_mesh(shape, (DATA_AXIS, TENSOR_AXIS), devices=jax.devices()[:2])
        for shape in ((1, 2), (2, 1))
    ],
    "stored": [{"model.layers.0.mlp.up_proj.weight": "q4_1"}],
    "groups": [
        {"model.layers.0.mlp.up_proj.weight": GroupForm("int8", 32, m)} for m in (False, True)
    ],
}
ROOM = {"slots": 2, "context": 64, "tokens": 259}
OTHER_ROOM = {"slots": [4], "context": [256], "tokens": [258], "paging": [Paging(64, 4)]}
VERIFICATION = {
    "widths": (0, 2),
    "support": 4,
    "rule": "coupled",
    "logprobs_of": "processed",
    "nodes": 3,
}
DRAFTING = {
    "k": 3,
    "support": 5,
    "rule": "coupled",
    "branches": 3,
    "saguaro_c": 0.5,
    "predict": "noise",
    "confident": True,
    "nodes": 6,
}
USUAL = Drafting(k=2, support=4, rule="ratio", branches=4)
NO_PROGRAM = {"progress", "compiler", "defer", "sibling", "batches"}
"""Parameters that change no program."""


def every(usual, fields):
    assert {field.name for field in dataclasses.fields(usual)} == fields.keys()
    return [dataclasses.replace(usual, **{name: value}) for name, value in fields.items()]


def parameters(make):
    return set(inspect.signature(make).parameters) - NO_PROGRAM


def test_a_model_is_made_from_all_that_it_is_given():
    ids = [reduced([1, 5, 9]), reduced([1, 5, 8])]
    experts = Experts(count=4, chosen=2, intermediate=32)
    mechanisms = dataclasses.replace(CONFIG.mechanisms, experts=experts)
    of_experts = MODEL | {
        "config": dataclasses.replace(CONFIG, mechanisms=mechanisms),
        "mesh": MODELS["mesh"][0],
    }
    parallel = [FunctionalModel(**of_experts, expert_parallel=value) for value in (False, True)]
    assert parameters(FunctionalModel) == {*MODEL, *MODELS, "output_ids", "expert_parallel"}
    others = [FunctionalModel(**MODEL | {n: v}) for n, values in MODELS.items() for v in values]
    texts = [model.fingerprint for model in (FunctionalModel(**MODEL), *ids, *parallel, *others)]
    assert len({*texts}) == len(texts)
    assert FunctionalModel(**MODEL).fingerprint == texts[0]


@pytest.mark.parametrize(
    ("make", "about", "others"),
    [
        (Programs, "verification", every(Verification(), VERIFICATION)),
        (DraftPrograms, "drafting", every(USUAL, DRAFTING)),
    ],
)
def test_programs_are_made_from_all_that_they_are_given(make, about, others):
    model, usual = FunctionalModel(**MODEL), {**ROOM}
    if make is DraftPrograms:
        usual["drafting"] = USUAL
    changes = {**OTHER_ROOM, about: others}
    changes["model"] = [FunctionalModel(CONFIG, MODELS["execution"][0])]
    assert parameters(make) == set(changes)
    first = cache_keys(make, **usual, model=model)
    assert cache_keys(make, **usual, model=model) == first
    texts = [{*first.values()}]
    for name, values in changes.items():
        for value in values:
            settings = {"model": model, **usual, name: value}
            texts.append({*cache_keys(make, **settings).values()})
    assert all(len(text) == 1 for text in texts)
    assert len(set.union(*texts)) == len(texts)


def test_trees_are_made_from_their_size_and_their_draft():
    model, sizes = FunctionalModel(**MODEL), {"nodes": 5, "depth": 3, "ranks": 2}
    sizes["ancestors"] = 2
    shape, plain = TreeShape(nodes=4, depth=2), dataclasses.replace(USUAL, branches=0)
    changes = {**OTHER_ROOM, "shape": every(shape, sizes), "drafting": every(plain, DRAFTING)}
    assert parameters(TreeDraftPrograms) == {*changes, "model"}
    usual = {**ROOM, "shape": shape, "drafting": plain}
    texts = [{*cache_keys(TreeDraftPrograms, model, **usual).values()}]
    for name, values in changes.items():
        for value in values:
            keys = cache_keys(TreeDraftPrograms, model, **usual | {name: value})
            texts.append({*keys.values()})
    assert all(len(text) == 1 for text in texts)
    assert len(set.union(*texts)) == len(texts)


def test_branches_off_trees_are_made_from_their_draft():
    model, usual = FunctionalModel(**MODEL), dataclasses.replace(USUAL, nodes=7)
    assert parameters(TreeExpansionPrograms) == {"base", "drafting"}

    def base(**room):
        shape = TreeShape(nodes=7, depth=usual.k)
        settings = {**ROOM, "drafting": usual.in_turn, "shape": shape, **room}
        return TreeDraftPrograms(model, **settings, compiler=lambda *_: {})

    bases = [base(), *(base(**{name: value}) for name in OTHER_ROOM for value in OTHER_ROOM[name])]
    pairs = [(made, usual) for made in bases]
    pairs += [(bases[0], drafting) for drafting in every(usual, DRAFTING)]
    texts = [{*cache_keys(TreeExpansionPrograms, *pair).values()} for pair in pairs]
    assert all(len(text) == 1 for text in texts)
    assert len(set.union(*texts)) == len(texts)


def test_branches_are_made_from_their_number_and_their_base():
    model = FunctionalModel(**MODEL)
    bases = [
        DraftPrograms(model, **ROOM, drafting=branching, compiler=lambda *_: {})
        for branching in (USUAL, dataclasses.replace(USUAL, branches=5))
    ]
    assert parameters(ExpansionPrograms) == {"base", "branches"}
    found = [cache_keys(ExpansionPrograms, *pair) for pair in [(bases[0], 4), (bases[0], 3)]]
    found += [cache_keys(ExpansionPrograms, base) for base in bases]
    first, fewer, usual, other = ({*keys.values()} for keys in found)
    assert first == usual
    assert len(first | fewer | other) == 3


@pytest.fixture
def store(tmp_path, no_cache_of_the_user):
    found = ProgramStore(tmp_path)
    use_store(found)
    return found


def made(directory):
    return sorted(directory.glob("lookup-*.program"))


def compiled(text="x + 1", *, host_args=()):
    """A program that `text` says, from the store if it is there."""
    struct = jax.ShapeDtypeStruct((4,), jnp.int32)
    spec = ProgramSpec(eval(f"lambda x, y: ({text}, y)"), (struct, struct), host_args=host_args)
    return spec._replace(cache_key=text).compile(None, ("a", 1))


def run(program):
    return [np.asarray(array).tolist() for array in program(*[np.arange(4, dtype=np.int32)] * 2)]


def build_none(monkeypatch):
    """Nothing that is looked up is traced, and nothing at all is compiled."""
    monkeypatch.setattr(ProgramSpec, "_compile_or_load", lambda *_: pytest.fail("it is traced"))
    monkeypatch.setattr(stored_jit, "_store", lambda *_: pytest.fail("it is compiled"))


@pytest.mark.parametrize("host_args", [(), (0,)])
def test_the_next_start_does_not_build_a_stored_model(store, monkeypatch, host_args):
    arguments = [np.arange(4, dtype=np.int32)] * 2
    first = [np.asarray(array) for array in compiled(host_args=host_args)(*arguments)]
    assert len(made(store.directory)) == 1
    jax.clear_caches()
    build_none(monkeypatch)
    again = compiled(host_args=host_args)
    np.testing.assert_array_equal(first, [np.asarray(array) for array in again(*arguments)])
    assert again.memory_analysis() is not None
    with pytest.raises(pytest.fail.Exception):
        compiled("x + 2", host_args=host_args)


def test_without_a_name_or_our_store_a_model_is_built(store):
    spec = ProgramSpec(lambda x: x, (jax.ShapeDtypeStruct((1,), jnp.int32),))
    spec.compile(None, ("a",))
    spec._replace(cache_key="something").compile(None)
    assert made(store.directory) == []
    use_store(None)
    compiled()
    assert made(store.directory) == []


def package(tmp_path, monkeypatch):
    """Sources that are as old as those of a package that was not changed."""
    path = tmp_path / "package"
    path.mkdir()
    (path / "module.py").write_text("a = 1\n")
    monkeypatch.setattr(lookup, "_PACKAGE", path)
    lookup._sources_digest.cache_clear()
    return path


@pytest.fixture(autouse=True)
def _old_sources(monkeypatch):
    """Also where they were edited just now."""
    monkeypatch.setattr(lookup, "_IMPORTED", time.time() + 600)
    lookup._sources_digest.cache_clear()
    yield
    lookup._sources_digest.cache_clear()


@pytest.mark.parametrize("change", ["edited", "edited since", "compiled alone", "vanished"])
def test_where_it_is_not_known_which_sources_run_nothing_is_kept(
    store, tmp_path, monkeypatch, change
):
    path = package(tmp_path, monkeypatch)
    if change == "edited since":
        assert lookup._sources_digest()
    if change == "compiled alone":
        (path / "module.py").rename(path / "module.h")
    elif change == "vanished":
        monkeypatch.setattr(lookup, "_sources", lambda: [path / "gone.py"])
    else:
        monkeypatch.setattr(lookup, "_IMPORTED", time.time() + 9)
    assert run(compiled()) == run(compiled())
    assert made(store.directory) == []


def test_leftovers_of_editors_are_no_sources(store, tmp_path, monkeypatch):
    path = package(tmp_path, monkeypatch)
    compiled()
    (path / ".#module.py").symlink_to("somebody@host:1")
    (path / ".module.py").write_text("a = 2\n")
    (path / "folder.py").mkdir()
    lookup._sources_digest.cache_clear()
    build_none(monkeypatch)
    compiled()


@pytest.mark.more
def test_flags_are_those_that_xla_has_read(tmp_path):
    """Also from a file, which has one name whatever is in it."""
    file = tmp_path / "flags"
    printed = []
    for value in ("true", "false", "true"):
        file.write_text(f"--xla_cpu_enable_fast_math={value}\n")
        code = "from ssd_jax.system.stored_jit import _flags; print(_flags())"
        command = [sys.executable, "-c", code]
        env = {**os.environ, "XLA_FLAGS": str(file)}
        printed.append(subprocess.run(command, env=env, capture_output=True, check=True).stdout)
    assert printed[0] == printed[2] != printed[1]


def test_why_there_are_no_handlers_makes_no_other_program(monkeypatch):
    """It may name a directory that is another at every start."""
    surroundings = []
    for why in (None, "/tmp/one/0.o: no", "/tmp/other/0.o: no"):
        monkeypatch.setattr(lookup.handlers, "why_missing", lambda why=why: why)
        surroundings.append(lookup.surroundings(jax.devices()[0].client))
    assert surroundings[0] != surroundings[1] == surroundings[2]


OPTIONS = (("xla_cpu_enable_fast_math", False),)


@pytest.mark.parametrize(
    "change", [{"donate": (0,)}, {"shape": (8,)}, {"host_args": (0,)}, {"options": OPTIONS}]
)
def test_other_arguments_are_another_program_whatever_the_cache_key(store, change):
    for about in ({}, change, {}, change):
        struct = jax.ShapeDtypeStruct(about.get("shape", (4,)), jnp.int32)
        spec = ProgramSpec(lambda x, y: (x + 1, y), (struct, struct), cache_key="the same")
        spec._replace(**{n: v for n, v in about.items() if n != "shape"}).compile(None, ("a",))
    assert len(made(store.directory)) == 2


@pytest.mark.parametrize("host_args", [(), (0,)])
def test_the_compiler_gets_its_options(host_args):
    struct = jax.ShapeDtypeStruct((4,), jnp.int32)
    spec = ProgramSpec(
        lambda x: x, (struct,), host_args=host_args, options=(("no_such_option", True),)
    )
    with pytest.raises(Exception, match="no_such_option"):
        spec.compile(None)


@pytest.mark.parametrize("what", ["source", "flags", "setting", "processor", "devices"])
def test_everything_else_that_decides_a_program_is_in_its_key(
    store, request, monkeypatch, tmp_path, what
):
    compiled()
    if what == "source":
        package(tmp_path, monkeypatch)
    elif what == "flags":
        monkeypatch.setattr(stored_jit, "_flags", lambda: ("others",))
    elif what == "setting":
        request.addfinalizer(lambda: jax.config.update("jax_default_matmul_precision", None))
        jax.config.update("jax_default_matmul_precision", "highest")
    elif what == "processor":
        monkeypatch.setattr(stored_jit, "processor", lambda: "another")
    else:
        monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[1:2])
    lookup._sources_digest.cache_clear()
    compiled()
    assert len(made(store.directory)) == 2


@pytest.mark.parametrize("damage", ["executable", "entry", "another JAX"])
def test_a_program_that_cannot_be_loaded_is_built_and_stored_again(store, monkeypatch, damage):
    expected = run(compiled())
    (entry,) = made(store.directory)
    (executable,) = store.directory.glob("_lambda_*.program")
    if damage == "executable":
        executable.unlink()
    elif damage == "entry":
        store.put(key_of(entry), b"no program")
    else:
        monkeypatch.setattr(jax.stages, "Compiled", None)
    jax.clear_caches()
    assert run(compiled()) == expected
    monkeypatch.undo()
    build_none(monkeypatch)
    assert run(compiled()) == expected


SSD = {"mode": "ssd", "draft_placement": "inline", "k": 3, "budget": 8}


@pytest.mark.more
@pytest.mark.parametrize(("settings", "mesh"), [(SSD, None), ({"mode": "ar"}, "data=2,tensor=2")])
def test_models_say_the_same_from_stored_programs(
    tmp_path, monkeypatch, no_cache_of_the_user, settings, mesh
):
    """Every mode, its programs built and kept, and from the store alone."""
    target, draft = tiny_pair.write(tmp_path, num_key_value_heads=2, **SHAPE)
    room = {"context": 320, "slots": 4, "dtype": "float32", "mesh": mesh}
    room |= settings | ({"draft": draft} if mesh is None else {})

    def printed():
        with LLM(target, compile_cache=str(tmp_path / "kept"), **room) as llm:
            asked = requests(llm, "ratio")
            return [[o.token_ids for o in outputs(llm, asked, mode)] for mode in llm.modes]

    first = printed()
    jax.clear_caches()
    build_none(monkeypatch)
    assert printed() == first


START = """
import json, sys
from ssd_jax import LLM, SamplingParams
from ssd_jax.devices.programs import lookup
from ssd_jax.devices.programs.program_spec import ProgramSpec
from ssd_jax.system import stored_jit
lookup._IMPORTED += 600
if sys.argv[3] == "kept":
    ProgramSpec._compile_or_load = lambda *_: sys.exit('it is traced')
    stored_jit._store = lambda *_: sys.exit('it is compiled')
with LLM(sys.argv[2], compile_cache=sys.argv[1], dtype="bfloat16", context=64) as llm:
    (out,) = llm.generate("some text", SamplingParams(max_tokens=8, temperature=1.0))
print(json.dumps(out.token_ids))
"""


@pytest.mark.more
def test_another_process_finds_stored_programs(tiny_checkpoint, tmp_path):
    def start(how):
        command = [sys.executable, "-c", START, str(tmp_path), str(tiny_checkpoint), how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert start("built") == start("kept")
