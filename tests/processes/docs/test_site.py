"""Documentation site: each page is in the navigation, and links out of docs/ lead to existing files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tools.site import hooks

MKDOCS = hooks.ROOT / "tools" / "site" / "mkdocs.yml"
PAGE = re.compile(r"^ *- (?:[^:#\n]+: )?(\S+\.md)$", re.MULTILINE)


def list_pages() -> set[str]:
    found = (path.relative_to(hooks.DOCS).as_posix() for path in hooks.DOCS.rglob("*.md"))
    return {page for page in found if not page.startswith("decisions/")}


def test_each_page_is_in_navigation_once() -> None:
    named = PAGE.findall(MKDOCS.read_text())
    assert sorted(named) == sorted(list_pages())


def test_linked_files_outside_docs_exist() -> None:
    shown = {path for page in list_pages() for path in hooks.linked(page, (hooks.DOCS / page).read_text())}
    assert "examples/quickstart.yaml" in shown
    assert len(shown) > 40
    assert all(hooks.content(path).startswith("# ") for path in shown)


@pytest.mark.parametrize("text", ["[x](../examples/none.yaml)", "[x](../workloads/rlrun/gone.py#L3)"])
def test_dead_link_is_reported_with_its_page(text: str) -> None:
    with pytest.raises(LookupError, match=r"docs/data\.md: the link \.\./\S+ leads to no file of the repository"):
        hooks.linked("data.md", text)


@pytest.mark.parametrize(
    ("page", "to", "path"),
    [
        ("data.md", "../examples/eval.yaml", "examples/eval.yaml"),
        ("reference/rlrun.md", "../data.md", "docs/data.md"),
        ("decisions/0002-x.md", "../../operator/rlrun_operator/names.py", "operator/rlrun_operator/names.py"),
        ("source/SECURITY.md.md", "docs/security.md", "docs/security.md"),
    ],
)
def test_relative_link_is_resolved_from_its_file(page: str, to: str, path: str) -> None:
    assert hooks.target(page, to) == path


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("Any OpenAI-style server", "any-openai-style-server"),
        ("`kubectl apply` refuses the manifest", "kubectl-apply-refuses-the-manifest"),
        ("Memory & time: a table", "memory--time-a-table"),
        ("model_max_length", "model_max_length"),
    ],
)
def test_site_anchors_equal_repository_anchors(heading: str, anchor: str) -> None:
    assert hooks.slug(heading, "-") == anchor


def test_site_loads_nothing_from_other_hosts() -> None:
    config = MKDOCS.read_text()
    assert "font: false" in config
    assert "http" not in config.replace("RLRUN_SITE_URL", "")
    assert Path(hooks.ROOT / "requirements" / "site.txt").read_text().count("--hash=sha256:") > 50


def test_each_navigation_title_starts_with_capital() -> None:
    named = [line.strip("- \n") for line in MKDOCS.read_text().partition("\nnav:\n")[2].splitlines() if line.strip()]
    titles = {line.partition(": ")[2]: line.partition(": ")[0] for line in named if line.endswith(".md")}
    assert titles.pop("") == "algorithms/README.md", "the page of its tab"
    assert titles["reference/cli.md"] == "Command line"
    plain = {page: title for page, title in titles.items() if not page.startswith("algorithms/")}
    assert [title for title in plain.values() if not title[0].isupper()] == []


def test_landing_page_has_object_three_entries_and_install_line() -> None:
    landing, readme = ((hooks.ROOT / name).read_text() for name in ("docs/README.md", "README.md"))
    (shown,) = re.findall(r"```yaml\n(.*?)```", landing, re.DOTALL)
    assert shown in readme
    spec = yaml.safe_load((hooks.ROOT / "examples/quickstart.yaml").read_text())
    assert_part(yaml.safe_load(shown), spec)
    head = landing.partition("\n## ")[0]
    assert re.findall(r"^- \*\*(.+)\*\*$", head, re.MULTILINE) == ["Run it", "Install it", "Understand it"]
    assert "make quickstart" in head
    (picture,) = re.findall(r"!\[.+\]\((.+)\)", head)
    assert (hooks.DOCS / picture).is_file()
    assert hooks.page_meta("README.md") == {"hide": ["navigation", "toc"]}


def assert_part(part: object, whole: object) -> None:
    """Assert that the example of the tests contains all of the short object."""
    if isinstance(part, dict) and isinstance(whole, dict):
        for name, value in part.items():
            assert_part(value, whole.get(name))
    else:
        assert part == whole


def test_decisions_are_last_in_search() -> None:
    boosts = [hooks.page_meta(page).get("search") for page in ("data.md", "source/README.md.md", "decisions/0002-x.md")]
    assert boosts == [None, {"boost": 0.01}, {"boost": 1e-5}]
