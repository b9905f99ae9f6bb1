"""Rules and tasks of other installed packages, which name them as entry points."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UserError

GROUPS = {"rule": "pods_rl.rules", "batch rule": "pods_rl.batch_rules", "task": "pods_rl.tasks"}


@dataclass(frozen=True)
class Brought:
    """A rule or task of an installed package: its name, the package with its version, and the import path."""

    name: str
    package: str
    path: str


def brought(kind: str, damaged: list[str] | None = None) -> list[Brought]:
    """Return the rules or the tasks of installed packages; nothing of them is imported.

    Args:
        kind: rule, batch rule or task; other kinds have no entry points.
        damaged: receives a sentence on each package whose entry points or metadata cannot be read.

    >>> brought("reward")
    []
    """
    if kind not in GROUPS:
        return []
    from importlib.metadata import distributions  # slow to import, and most names are ours

    found: dict[Brought, None] = {}  # a package may be in the path twice
    for package in distributions():
        try:
            for entry in package.entry_points.select(group=GROUPS[kind]):
                name = f"{package.metadata['Name']} {package.metadata['Version']}"
                if None in (package.metadata["Name"], package.metadata["Version"]):
                    raise ValueError("its METADATA has no name or no version")
                found[Brought(entry.name, name, f"{entry.module}:{entry.attr}")] = None
        except Exception as error:  # each damage raises an error of its own
            folder = getattr(package, "_path", None) or package
            reason = " ".join(str(error).split()) or type(error).__name__
            if damaged is not None:
                damaged.append(f"The entry points of {folder} cannot be read ({reason}). Install the package again.")
    return list(found)


def find_brought(kind: str, name: str) -> Brought | None:
    """Return the rule or task of an installed package under this name; None if no package has one.

    Raises:
        UserError: two packages have different ones under this name.
    """
    found = {entry.path: entry for entry in brought(kind) if entry.name == name}
    if len(found) > 1:
        packages = " and ".join(f"{entry.package} ({entry.path})" for entry in found.values())
        raise UserError(
            f"the {kind} '{name}' is one of several packages, {packages}: give one of these paths, or uninstall the "
            "other packages."
        )
    return next(iter(found.values()), None)
