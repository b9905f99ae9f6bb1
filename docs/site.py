"""What MkDocs does not do by itself: pages that lie outside docs/, and doctests in docstrings."""

import ast
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# pages of the repository's other folders, and their place on the site
OUTSIDE = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)([^)]*)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages outside docs/, so that one copy of each serves the repository and the site."""
    for source, place in OUTSIDE.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, place, content=relinked(text, source, place)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite the links of a page in docs/ that leave it."""
    place = page.file.src_uri
    return markdown if place in OUTSIDE.values() else relinked(markdown, f"docs/{place}", place)


def relinked(text: str, source: str, place: str) -> str:
    """Return a page of the repository with its links as they must be at its place on the site.

    A link to a file that is not on the site becomes its text.

    >>> relinked("[a](docs/a.md#b), [c](src/c.py)", "README.md", "index.md")
    '[a](a.md#b), c'
    >>> relinked("[home](../../README.md#x)", "docs/results/a.md", "results/a.md")
    '[home](../index.md#x)'
    """

    def rewrite(found: re.Match[str]) -> str:
        image, label, link, anchor = found.groups()
        target = normpath(str(PurePosixPath(source).parent / link))
        page = target.startswith("docs/") and not (ROOT / target).is_dir()
        inside = OUTSIDE.get(target, target.removeprefix("docs/") if page else None)
        if inside is None:
            return label
        return f"{image}[{label}]({relpath(inside, PurePosixPath(place).parent)}{anchor})"

    return LINK.sub(rewrite, text)


class Doctests(griffe.Extension):
    """Puts the doctests of docstrings into code blocks: as Markdown, `>>>` is a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    r"""Return a docstring with a fence around each doctest, which ends at an empty line.

    >>> fenced("Add.\n\n>>> 1 + 1\n2")
    'Add.\n\n```pycon\n>>> 1 + 1\n2\n```'
    """
    blocks = re.split(r"\n(?:[ \t]*\n)+", text)
    return "\n\n".join(re.sub(r"(?ms)^( *)(>>> .*)", r"\1```pycon\n\1\2\n\1```", block) for block in blocks)


class FieldHelp(griffe.Extension):
    """Documents a dataclass field by the `help` of its metadata."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        found = re.search(r"'help':\s*((?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\s)+)", str(attr.value))
        if found and not attr.docstring:
            attr.docstring = griffe.Docstring(ast.literal_eval(f"({found[1]})"), parent=attr)
