"""The docs are about this code: what they name is there, and what is there is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def tree_of_the_design() -> set[str]:
    """Every path in the tree of section 4."""
    section = (ROOT / "docs/design.md").read_text().split("\n## 4. Tree\n", 1)[1]
    block = section.split("```", 2)[1]
    paths: set[str] = set()
    folder = ""
    for line in block.splitlines():
        if not line.strip():
            continue
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name if len(line.split()) == 1 else ""
            paths.add(name)
        else:
            paths.add(folder + name)
    return paths


def anchors_of(page: Path) -> set[str]:
    """What a link to a heading of the page may end in."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", sorted(tree_of_the_design()))
def test_the_tree_of_the_design_is_there(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_module_of_the_package_is_in_the_tree_of_the_design() -> None:
    named = tree_of_the_design()
    folders = tuple(path for path in named if path.endswith("/") and path != "infinity/")
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "infinity").rglob("*.py") if path.name != "__init__.py"}
    assert {module for module in modules if module not in named and not module.startswith(folders)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors_of(linked), f"{page.name} links to {target}"
