"""What MkDocs does not do by itself: pages outside docs/, the keys of a recipe, and doctests in docstrings."""

import ast
import json
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

from pods_rl.recipe.schema import COMPUTED, UNSUPPORTED, Field, fields, trl_fields

ROOT = Path(__file__).parents[1]
KEYS_PAGE = "keys.md"
# pages of the repository's other folders, and their place on the site
OUTSIDE = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# The notes for readers of a checkout on pages that only `make docs` completes.
CHECKOUT_NOTE = re.compile(r"^(?:> .*\n)+\n?", re.MULTILINE)
# How much a page counts in the search: what a first day needs before the reference, whose pages are long.
BOOST = {
    "how-do-i.md": 8,
    "on-a-gpu.md": 4,
    "tutorial.md": 4,
    "keys.md": 0.2,
    "architecture.md": 0.5,
    "changelog.md": 0.1,
    "contributing.md": 0.1,
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)([^)]*)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages outside docs/, so that one copy of each serves the repository and the site."""
    for source, place in OUTSIDE.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, place, content=relinked(text, source, place)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite the links of a page in docs/ that leave it, and remove its notes for readers of a checkout."""
    place = page.file.src_uri
    if place in OUTSIDE.values():
        return markdown
    markdown = relinked(CHECKOUT_NOTE.sub("", markdown), f"docs/{place}", place)
    if place == KEYS_PAGE:
        markdown = with_keys(markdown)
    return markdown


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Set how much a page counts in the search."""
    page.meta["search"] = {"boost": BOOST.get(page.file.src_uri, 1)}
    return html


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


def with_keys(markdown: str) -> str:
    """Return the page of keys with the keys of each group at its marker, `<!-- keys: GROUP -->`."""
    groups: dict[str, list[Field]] = {}
    for field in fields().values():
        groups.setdefault(group_of(field), []).append(field)

    def entries(marker: re.Match[str]) -> str:
        return "\n\n".join(entry(field) for field in groups[marker[1]])

    return re.sub(r"<!-- keys: (\w+) -->", entries, markdown)


def group_of(field: Field) -> str:
    """Return the group of a key: refused, pods, task, evaluation, run, or a class of TRL or transformers.

    >>> group_of(fields()["num_rollouts"]), group_of(fields()["lora_r"]), group_of(fields()["eval_prompts"])
    ('pods', 'ModelConfig', 'evaluation')
    """
    if field.name in UNSUPPORTED:
        return "refused"
    if field.name in trl_fields():
        origin = trl_fields()[field.name].source
        return {"_BaseConfig": "GRPOConfig"}.get(origin, origin)
    if field.name.startswith("eval_"):
        return "evaluation"
    return {"engine": "pods"}.get(field.section, field.section)


def entry(field: Field) -> str:
    """Return a heading with the name of a key, then its type, default and meaning.

    >>> print(entry(fields()["threads"]))
    ### `threads`
    <BLANKLINE>
    A whole number or null in `[1, 4096]`. Default: `null` (torch's own).
    <BLANKLINE>
    CPU threads of torch.
    """
    facts = [f"{field.expected[0].upper()}{field.expected[1:]}"]
    if field.within:
        facts.append(f" in `{field.within}`")
    facts.append(". Default: ")
    if field.default == COMPUTED:
        facts.append("chosen at run time")
    else:
        facts.append(f"`{json.dumps(field.default)}`")
    # The source of a TRL default is the name of its class, which the group says.
    if field.source and not field.source.endswith(("Config", "Arguments")):
        facts.append(f" ({escaped(field.source)})")
    meaning = f"{field.help[0].upper()}{field.help[1:]}"
    paragraphs = [f"### `{field.name}`", f"{''.join(facts)}.", escaped(meaning)]
    if field.name in UNSUPPORTED:
        paragraphs.append(f"A recipe refuses it: {escaped(UNSUPPORTED[field.name])}.")
    return "\n\n".join(paragraphs)


def escaped(text: str) -> str:
    r"""Return plain text for Markdown: code spans and links stay, other marks are escaped.

    >>> escaped("`a_b` is <x>*, see [TRL](https://a.b)")
    '`a_b` is \\<x\\>\\*, see [TRL](https://a.b)'
    """
    parts = re.split(r"(`[^`]*`)", text)
    for place in range(0, len(parts), 2):  # the others are code spans
        parts[place] = re.sub(r"([*<>|])", r"\\\1", parts[place])
    return "".join(parts)


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
