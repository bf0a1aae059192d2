"""Links and names of modules in the documents lead somewhere, and the two pages that everybody
reads first stay short."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_MODULE = re.compile(r"`([\w/.-]+\.py)`")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    assert [link for link in _links(page) if not _resolves(page, link)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_module_that_is_named_is_there(page: Path) -> None:
    """By its path from the root, or by its name alone where the text before says which folder."""
    named = _MODULE.findall(page.read_text())
    assert [name for name in named if name not in _modules()] == []


@pytest.mark.parametrize(
    ("page", "most_bytes"), [("README.md", 8_000), ("ARCHITECTURE.md", 12_000)]
)
def test_the_first_pages_are_short(page: str, most_bytes: int) -> None:
    assert (ROOT / page).stat().st_size <= most_bytes


def test_each_page_is_linked_from_another() -> None:
    linked = {_target(page, link)[0] for page in PAGES for link in _links(page)}
    assert [page for page in PAGES if page not in linked and page.name != "README.md"] == []


@functools.cache
def _modules() -> frozenset[str]:
    folders = ("benchmarks", "cli", "gateway", "gds", "kvfs", "s3api", "tests")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    paths = {str(path.relative_to(ROOT)) for path in found}
    return frozenset(paths | {path.name for path in found})


def _links(page: Path) -> Iterator[str]:
    for link in _LINK.findall(_CODE.sub("", page.read_text())):
        if "://" not in link:
            yield link


def _resolves(page: Path, link: str) -> bool:
    target, anchor = _target(page, link)
    return target.exists() and (not anchor or anchor in _anchors(target))


def _target(page: Path, link: str) -> tuple[Path, str]:
    path, _, anchor = link.partition("#")
    return ((page.parent / path).resolve() if path else page), anchor


def _anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get: lower case, hyphens for spaces, no punctuation."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in _HEADING.findall(text)
    }
