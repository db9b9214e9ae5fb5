"""Hooks of mkdocs that let the repository's own links work in the site, too.

README.md is the site's first page. A file outside of docs/ that a page links to becomes a page
under `repository/`: Markdown as it is, anything else as a block of code.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parent.parent
_HOME, _ELSEWHERE = "index.md", "repository/"
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[#)])")
_REMOTE = re.compile(r"[a-z]+:")
_LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the first page, and what pages link to outside of docs/."""
    files.append(File.generated(config, _HOME, content=(_ROOT / "README.md").read_text()))
    unread = [file for file in files if file.src_uri.endswith(".md")]
    while unread:
        for target in _targets(unread.pop()):
            there = target.startswith("docs/") or _page(target) in files.src_uris
            if not there and (_ROOT / target).is_file():
                added = _add(files, config, target)
                if target.endswith(".md"):
                    unread.append(added)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """The page with links to where things are in the site."""
    here = posixpath.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = _target(link[1], page.file.src_uri)
        return link[1] if target is None else posixpath.relpath(_page(target), here or ".")

    return _LINK.sub(moved, markdown)


def _add(files: Files, config: Any, target: str) -> File:
    """Adds a file of the repository as a page."""
    path = _ROOT / target
    text = path.read_text()
    if not target.endswith(".md"):
        language = _LANGUAGES.get(path.suffix, "text")
        text = f"# {target}\n\n`````{language}\n{text}\n`````\n"
    search = "---\nsearch:\n  exclude: true\n---\n"
    added = File.generated(config, _page(target), content=search + text)
    files.append(added)
    return added


def _targets(file: File) -> list[str]:
    """Files of the repository that a page links to, by their paths there."""
    found = (_target(link, file.src_uri) for link in _LINK.findall(file.content_string))
    return [target for target in found if target is not None]


def _target(link: str, page: str) -> str | None:
    """Path in the repository of what a page of the site links to; None for other links."""
    if _REMOTE.match(link):
        return None
    directory = posixpath.dirname(_source(page))
    target = posixpath.normpath(posixpath.join(directory, link))
    if (_ROOT / target).is_dir():
        target = posixpath.join(target, "README.md")
    return target


def _source(page: str) -> str:
    """Path in the repository of a page of the site."""
    if page == _HOME:
        return "README.md"
    if page.startswith(_ELSEWHERE):
        return page.removeprefix(_ELSEWHERE)
    return f"docs/{page}"


def _page(target: str) -> str:
    """Page of the site for a path in the repository."""
    if target == "README.md":
        return _HOME
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return _ELSEWHERE + (target if target.endswith(".md") else f"{target}.md")
