"""README and docs name what there is: files, classes, flags, metrics, targets of make, pages."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd_jax.config.config import Config
from ssd_jax.config.vllm_names import SAME_AS, TRANSLATED
from ssd_jax.engine.request_metrics import meanings
from ssd_jax.sampling.params import SamplingParams

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which tells of what is gone, too

PATH = re.compile(r"(?<![\w./-])((?:[\w-]+/)*[\w-]+\.(?:py|toml|md))(?:::([\w.]+))?(?![\w/])")
LINK = re.compile(r"\[((?:`[^`]*`|[^\]`])*)\]\(([^)\s]+)\)")
CLASS = re.compile(r"(?<![\w.:/])([A-Z][a-z]\w*)((?:\.\w+)?)(?![\w/])")
FLAG = re.compile(r"(?<![\w-])--(\w[\w-]*)")
PLANNED = {"Drain", "Cancel"}  # messages that docs/protocol.md says are not built yet
OF_OTHERS = {"None", "True", "False", "CheckpointManager"}


def _named(page: Path) -> str:
    return str(page.relative_to(ROOT))


pages = pytest.mark.parametrize("page", PAGES, ids=_named)


@functools.cache
def _files() -> tuple[Path, ...]:
    found = [path for top in ("ssd_jax", "tests", "docs", "configs") for path in _below(ROOT / top)]
    return (*found, *(path for path in ROOT.iterdir() if path.is_file()))


def _below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".pyc"]


@functools.cache
def _names(path: Path) -> frozenset[str]:
    """What a module defines, and with a dot what its classes do, in themselves or by `self.`."""
    found = set[str]()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for name in _defined(node):
            found.add(name)
            if isinstance(node, ast.ClassDef):
                inner = {attribute for part in ast.walk(node) for attribute in _defined(part)}
                found |= {f"{name}.{attribute}" for attribute in inner}
    return frozenset(found)


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    for target in [inner for node in targets for inner in ast.walk(node)]:
        if isinstance(target, ast.Name):
            yield target.id
        elif isinstance(target, ast.Attribute):
            yield target.attr


def _candidates(text: str) -> list[Path]:
    """Files of the repository that a path in a text may mean: whole, or of the package's rooms."""
    return [path for path in _files() if f"/{path.relative_to(ROOT)}".endswith(f"/{text}")]


def _code(text: str) -> list[str]:
    """Code within sentences and tables."""
    outside = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", outside)


def _blocks(text: str) -> list[str]:
    """Lines of code blocks; those that end with a backslash go on."""
    blocks = re.findall(r"^( *)```\w*\n(.*?)^\1```$", text, flags=re.DOTALL | re.MULTILINE)
    return [line for _, block in blocks for line in block.replace("\\\n", " ").splitlines()]


def _slugs(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_paths_in_docs_exist_and_hold_the_names_beside_them(page: Path) -> None:
    wrong = []
    for code in _code(page.read_text(encoding="utf-8")):
        for path, name in PATH.findall(code):
            files = _candidates(path)
            if not files or (name and not any(name in _names(file) for file in files)):
                wrong.append(code)
    assert not wrong


@pages
def test_classes_in_docs_exist(page: Path) -> None:
    known = {name for path in _files() if path.suffix == ".py" for name in _names(path)}
    wrong = [
        name + attribute
        for code in _code(page.read_text(encoding="utf-8"))
        if " " not in code.strip() or "(" in code
        for name, attribute in CLASS.findall(code)
        if name + attribute not in known | PLANNED | OF_OTHERS
    ]
    assert not wrong


@pages
def test_links_in_docs_lead_somewhere(page: Path) -> None:
    wrong = []
    for text, link in LINK.findall(page.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        there = path.exists() and path.is_relative_to(ROOT)
        if not there or (anchor and anchor not in _slugs(path)):
            wrong.append(link)
        elif path.suffix == ".py" and "::" in text:
            name = text.strip("`").partition("::")[2]
            if name not in _names(path):
                wrong.append(f"{text} in {link}")
    assert not wrong


@functools.cache
def _all_flags() -> frozenset[str]:
    """Of all commands and launch scripts; modules are read, not imported, since some start JAX."""
    found = {field.name for kind in (Config, SamplingParams) for field in dataclasses.fields(kind)}
    for path in (ROOT / "ssd_jax/cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found |= {*_make_flags(node)}
    for script in (ROOT / "launch").rglob("*.sh"):
        text = script.read_text(encoding="utf-8")
        found |= {*re.findall(r"^ +--(\w+)", text, re.MULTILINE)}
    return frozenset({*found, *SAME_AS, *TRANSLATED, "help", "version"})


def _make_flags(node: ast.AST) -> Iterator[str]:
    """Names in tables of flags, and those that absl is given one by one."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        named = any(isinstance(target, ast.Name) and target.id == "_FLAGS" for target in targets)
        keys = node.value.keys if named else []
    elif isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        keys = [key for key, value in pairs if isinstance(value, ast.Tuple)]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        keys = node.args[:1] if node.func.attr.startswith("DEFINE_") else []
    else:
        keys = []
    yield from (key.value for key in keys if isinstance(key, ast.Constant))


@pages
def test_flags_in_docs_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    commands = [code for code in _code(text) if code.startswith(("--", "ssd-jax "))]
    commands += [line for line in _blocks(text) if re.search(r"(^|[ /])ssd-jax ", line)]
    flags = {flag.replace("-", "_") for code in commands for flag in FLAG.findall(code)}
    assert flags <= _all_flags()


def test_the_table_of_metrics_is_the_declared_one() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rows = "\n".join(f"| `{key}` | {text} |" for key, text in meanings().items())
    assert f"| key | what |\n|---|---|\n{rows}\n\n" in page, rows


@pages
def test_make_targets_in_docs_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {*re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE)}
    code = [*_code(text), *_blocks(text)]
    named = {target for line in code for target in re.findall(r"^make (?:\w+=\S+ )?([\w-]+)", line)}
    assert named <= targets


@pages
def test_lists_in_docs_follow_an_empty_line(page: Path) -> None:
    """Else the site has no list there, while GitHub has one."""
    text = re.sub(
        r"^( *)```.*?^\1```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    paragraphs = [part.splitlines() for part in text.split("\n\n")]
    item = re.compile(r" *(- |\d+\. )")
    wrong = [
        lines[0]
        for lines in paragraphs
        if lines and not item.match(lines[0]) and any(item.match(line) for line in lines[1:])
    ]
    assert not wrong


def test_every_page_is_in_the_site() -> None:
    listed = {*re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)}
    assert listed == {page.name for page in PAGES if page.parent != ROOT} | {"index.md"}


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150
