"""Hooks of the documentation site: what pages link to outside of docs/ becomes pages of the site.

The site then stands alone: it needs no server that has the repository, and a link to a file that is gone ends the build.
"""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()(?P<to>[^)\s:#]+)(?P<anchor>#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json", ".sh": "bash", ".txt": "text"}
LANDING = "README.md"
SEARCH_BOOSTS = {"decisions/": 1e-5, "source/": 0.01}
"""Weights in the search, by the folder of a page; other pages have 1. The title of a page counts 1000 times as much as its text."""
LARGEST_BYTES = 200_000
"""Larger files are named, not shown."""


def slug(text: str, separator: str) -> str:
    """Anchor of a heading, as the repository's own pages have it: lower case, without punctuation, a hyphen per blank."""
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"<[^>]*>", "", text).strip().lower())
    return kept.replace(" ", separator)


def origin(page: str) -> str:
    """File of the repository that a page of the site shows."""
    return page.removeprefix("source/").removesuffix(".md") if page.startswith("source/") else f"docs/{page}"


def target(page: str, to: str) -> str:
    """File or folder of the repository that a page links to, from its root; `to`: the link, without its anchor."""
    return os.path.normpath((PurePosixPath(origin(page)).parent / to).as_posix())


def is_page(path: str) -> bool:
    """True if a file is one of docs/ itself; its folders are shown as those of the rest."""
    return path.startswith("docs/") and not (ROOT / path).is_dir()


def shown_at(path: str) -> str:
    """Page below docs/ that shows a file or a folder of the repository."""
    return f"source/{path}.md"


def linked(page: str, text: str) -> list[str]:
    """Files and folders of the repository outside of docs/ that a page links to.

    Raises:
        LookupError: the repository has no such file.
    """
    found = []
    for link in LINK.finditer(text):
        path = target(page, link["to"])
        if is_page(path):
            continue
        if path not in tracked():
            raise LookupError(f"{origin(page)}: the link {link['to']} leads to no file of the repository")
        found.append(path)
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file and folder of the repository that a page links to."""
    from mkdocs.exceptions import BuildError
    from mkdocs.structure.files import File, InclusionLevel

    shown: dict[str, str] = {}
    todo = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    try:
        while todo:
            for path in linked(*todo.pop()):
                if path not in shown:
                    shown[path] = content(path)
                    todo += [(shown_at(path), shown[path])] if path.endswith(".md") else []
    except LookupError as error:
        raise BuildError(str(error.args[0])) from None
    for path, text in shown.items():
        files.append(File.generated(config, shown_at(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links out of docs/ into links to the pages that show what is there."""
    here = page.file.src_uri
    page.meta.update(page_meta(here))

    def moved(found: re.Match[str]) -> str:
        path = target(here, found["to"])
        if not is_page(path):
            return os.path.relpath(shown_at(path), PurePosixPath(here).parent)
        return os.path.relpath(path, PurePosixPath("docs") / PurePosixPath(here).parent) + (found["anchor"] or "")

    return LINK.sub(moved, markdown)


def page_meta(page: str) -> dict[str, object]:
    """Return the settings of a page that its file does not have: repositories show them as a table."""
    boost = next((boost for folder, boost in SEARCH_BOOSTS.items() if page.startswith(folder)), None)
    if boost is not None:
        return {"search": {"boost": boost}}
    return {"hide": ["navigation", "toc"]} if page == LANDING else {}


def content(path: str) -> str:
    """Markdown that shows a file or a folder of the repository."""
    here = ROOT / path
    if here.is_dir():
        inside = sorted(name for name in tracked() if PurePosixPath(name).parent.as_posix() == path)
        return f"# {path}/\n\n" + "".join(f"- `{PurePosixPath(name).name}`\n" for name in inside)
    if here.suffix == ".md":
        return here.read_text()
    if here.stat().st_size > LARGEST_BYTES:
        return f"# {path}\n\nA file of {here.stat().st_size:,} bytes.\n"
    ticks = "`" * 8
    return f"# {path}\n\n{ticks}{LANGUAGES.get(here.suffix, 'text')}\n{here.read_text()}\n{ticks}\n"


@cache
def tracked() -> frozenset[str]:
    """Files of the repository, and their folders."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    files = {name for name in names if name}
    return frozenset(files | {parent.as_posix() for name in files for parent in PurePosixPath(name).parents})
