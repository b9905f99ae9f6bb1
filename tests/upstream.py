"""Which names of other libraries we import and a checkout of them lacks: python tests/upstream.py CHECKOUT...

A checkout is a folder with the package in it, or in `src/`. Nothing is installed or imported: every name that
`src/pods_rl` imports from a library is looked up in the library's source. For TRL, the tests that compare its methods
with what we know of them (`test_drift.py` and `test_contract.py` of `tests/engines`) run on its source afterwards.

The exit code is 1 if a name is missing or a test fails.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARIES = ("trl", "transformers", "accelerate", "peft", "verl", "skyrl", "skyrl_gym")
DRIFT = [f"tests/engines/test_{name}.py" for name in ("drift", "contract")]


def imported(library: str) -> Iterator[tuple[str, str, str]]:
    """Each name that we import from a library: its module, the name, and where we do."""
    for path in sorted((ROOT / "src" / "pods_rl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
                continue
            if node.module.partition(".")[0] == library:
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield from ((node.module, alias.name, place) for alias in node.names)


def has_name(source: Path, module: str, name: str) -> bool:
    """Whether a module's source has a name: as a word, since packages list what they load late as text."""
    path = source.joinpath(*module.split("."))
    if (path / f"{name}.py").is_file() or (path / name).is_dir():
        return True
    files = [path / "__init__.py", path.with_suffix(".py")]
    text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    if re.search(rf"\b{re.escape(name)}\b", text):
        return True
    # `from .module import *`, as transformers' packages of a model do
    starred = re.findall(r"^\s*from \.(\w+) import \*", text, flags=re.MULTILINE)
    return any(has_name(source, f"{module}.{part}", name) for part in starred)


def main(checkouts: list[str]) -> int:
    if not checkouts:
        raise SystemExit(__doc__)
    failed = False
    for checkout in map(Path, checkouts):
        sources = [folder for folder in (checkout / "src", checkout) if folder.is_dir()]
        found = [
            (source, name) for source in sources for name in LIBRARIES if (source / name / "__init__.py").is_file()
        ]
        if not found:
            raise SystemExit(f"{checkout}: no package of {', '.join(LIBRARIES)} is in it or in its src/")
        for source, library in found:
            names = list(imported(library))
            missing = [use for use in names if not has_name(source, use[0], use[1])]
            for module, name, place in missing:
                print(f"{place}: {module} has no {name}")
            print(f"{library} in {checkout}: {len(missing)} of {len(names)} names are missing", flush=True)
            failed |= bool(missing)
            if library == "trl" and not missing:
                path = os.pathsep.join([str(source.absolute()), os.environ.get("PYTHONPATH", "")])
                tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *DRIFT]
                failed |= bool(subprocess.run(tests, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
