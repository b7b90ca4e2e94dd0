"""Lets MkDocs build the site from the files as they are: the pages at the top of the tree become pages of the site.

A page links to others by their places in the tree, as a code host shows them. Links between pages are turned into those
of the site; what is no page (a folder, a script, a table of the tests) is named instead of linked.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# Pages at the top of the tree, and their names in the site.
_TOP = {name: name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")} | {"README.md": "index.md"}
_SOURCES = {target: name for name, target in _TOP.items()}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages at the top."""
    for name, target in _TOP.items():
        files.append(File.generated(config, target, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turns a page's links into those of the site."""
    uri = page.file.src_uri
    return _relinked(markdown, _SOURCES.get(uri, f"docs/{uri}"))


def _relinked(text: str, source: str) -> str:
    """Returns a page's text with links of the site; ``source`` is its place in the tree."""
    here = _in_site(source)

    def link(match: re.Match[str]) -> str:
        title, path, anchor = match[1], match[2], match[3] or ""
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        resolved = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        target = _in_site(resolved)
        if not target:
            return title
        return f"[{title}]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{anchor})"

    return _LINK.sub(link, text)


def _in_site(path: str) -> str:
    """Returns a file's place in the site; empty if it is not there."""
    if path in _TOP:
        return _TOP[path]
    inside = path.removeprefix("docs/")
    return inside if inside != path and (ROOT / path).is_file() else ""
