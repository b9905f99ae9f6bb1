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


def brought(kind: str) -> list[Brought]:
    """Return the rules or the tasks of installed packages; nothing of them is imported.

    Args:
        kind: rule, batch rule or task; other kinds have no entry points.

    >>> brought("reward")
    []
    """
    if kind not in GROUPS:
        return []
    from importlib.metadata import entry_points  # slow to import, and most names are ours

    entries = entry_points(group=GROUPS[kind])
    return [
        Brought(entry.name, f"{entry.dist.name} {entry.dist.version}", f"{entry.module}:{entry.attr}")
        for entry in entries
        if entry.dist  # of a package, and not made by hand
    ]


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
