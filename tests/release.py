"""Checks the packages of a release (`make dist`): python tests/release.py FOLDER [ENVIRONMENT]

FOLDER holds one wheel and one source distribution. The wheel must have each file of the package that git has and
nothing else, the source distribution all that its tests need. With an ENVIRONMENT, the command installed there trains
for five seconds in an empty folder.
"""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_SHIPPED = (".ci/", ".devcontainer/", ".dockerignore", ".github/", ".gitignore", ".pre-commit-config.yaml")


def tracked(*paths: str) -> set[str]:
    """The files that git has under these paths."""
    listed = subprocess.run(["git", "ls-files", "-z", *paths], cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in listed.stdout.split("\0") if name}


def the_one(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder} has {len(found)} files {pattern}, not one. Empty it and build again.")
    return found[0]


def check_wheel(path: Path) -> None:
    """Refuse a wheel that lacks a file of the package, has others, or is not the version cited."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        metadata = wheel.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    inside = {name for name in names if ".dist-info/" not in name}
    differ("the wheel", {name.removeprefix("src/") for name in tracked("src")}, inside)
    version = metadata.partition("\nVersion: ")[2].partition("\n")[0]
    if f"\nversion: {version}\n" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8"):
        raise SystemExit(f"CITATION.cff has not the version of the wheel, {version}.")


def check_source(path: Path) -> None:
    """Refuse a source distribution that lacks a file that git has, but for those that only its host uses."""
    with tarfile.open(path) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {name for name in tracked() if not name.startswith(NOT_SHIPPED)}
    differ("the source distribution", wanted, inside & wanted)


def differ(what: str, wanted: set[str], inside: set[str]) -> None:
    lines = [f"{what} lacks {name}" for name in sorted(wanted - inside)]
    lines += [f"{what} should not have {name}" for name in sorted(inside - wanted)]
    if lines:
        raise SystemExit("\n".join(lines[:20]))


def check_installed(environment: Path) -> None:
    """Train with the installed command, and read what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        pods = [str(environment.resolve() / "bin" / "pods")]
        for words in (
            ["--help"],
            ["train", "--config", "tiny-pods", "--max_seconds", "5", "--output", "run"],
            ["report", "run"],
        ):
            print("== pods", *words, flush=True)
            subprocess.run(pods + words, cwd=folder, check=True)
        if not Path(folder, "run", "report", "report.html").is_file():
            raise SystemExit("pods report wrote no run/report/report.html")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    check_wheel(the_one(folder, "*.whl"))
    check_source(the_one(folder, "*.tar.gz"))
    print("the wheel and the source distribution are complete")
    if len(sys.argv) > 2:
        check_installed(Path(sys.argv[2]))
