"""Counts of what makes the project long or hard to read. No count may rise above its limit, and a limit only falls.

`python tests/test_plainness.py` prints the counts of today. Lower a limit when its count has fallen.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORD = re.compile(r"[A-Za-z]{2,}")
SENTENCE = 4  # words from which on a text is a sentence
PRIVATE = re.compile(r"\b_[a-z]\w*")

LIMITS = {
    "lines of src": 34500,
    "lines of tests": 25700,
    "words of pages": 18800,
    "docstrings longer than the body": 110,
    "internal functions that are named at one place": 268,
    "names that several modules define": 21,
    "checks that compare a sentence": 138,
}


def sources(folder: str) -> list[str]:
    return [file.read_text(encoding="utf-8") for file in sorted((ROOT / folder).rglob("*.py"))]


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement, also of inner blocks; expressions have most of the nodes, and are not looked at."""
    for statement in body:
        yield statement
        blocks = [statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
        for block in blocks:
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(block, part, ()))


def has_long_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    docstring, *body = function.body
    if ast.get_docstring(function) is None or not body:
        return False
    return docstring.end_lineno - docstring.lineno > body[-1].end_lineno - body[0].lineno


def names_of(statement: ast.stmt) -> list[str]:
    """The names that a statement of a module defines."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else getattr(statement, "targets", [])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def compares_a_sentence(statement: ast.stmt) -> bool:
    """Whether a statement of a test compares the words of a message: the type of an error and its key say enough."""
    compared: list[ast.AST] = []
    if isinstance(statement, ast.Assert):
        compared = [part for part in ast.walk(statement.test) if isinstance(part, ast.Compare)]
    elif isinstance(statement, ast.With):
        calls = [item.context_expr for item in statement.items if isinstance(item.context_expr, ast.Call)]
        compared = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == "match"]
    texts = [part.value for check in compared for part in ast.walk(check) if isinstance(part, ast.Constant)]
    return any(isinstance(text, str) and len(WORD.findall(text)) >= SENTENCE for text in texts)


def counts() -> dict[str, int]:
    src = sources("src")
    tests = sources("tests")
    uses = Counter(name for text in src for name in PRIVATE.findall(text))
    modules: Counter[str] = Counter()  # by name, how many modules define it
    private: set[str] = set()
    long_docstrings = 0
    for text in src:
        tree = ast.parse(text)
        modules.update({name for statement in tree.body for name in names_of(statement) if name[:2] != "__"})
        for statement in statements(tree.body):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                long_docstrings += has_long_docstring(statement)
                private |= set(PRIVATE.findall(statement.name))
    pages = {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "CHANGELOG.md"}
    return {
        "lines of src": sum(text.count("\n") for text in src),
        "lines of tests": sum(text.count("\n") for text in tests),
        "words of pages": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
        "docstrings longer than the body": long_docstrings,
        "internal functions that are named at one place": sum(uses[name] == 2 for name in private),  # and in their def
        "names that several modules define": sum(count > 1 for count in modules.values()),
        "checks that compare a sentence": sum(
            compares_a_sentence(statement) for text in tests for statement in statements(ast.parse(text).body)
        ),
    }


def test_no_count_rises():
    over = {what: count for what, count in counts().items() if count > LIMITS[what]}
    assert over == {}, f"limits: {LIMITS}"


if __name__ == "__main__":
    for what, count in counts().items():
        print(f'    "{what}": {count},')
