"""The verl engine: PODS as plug-ins of verl's trainer (the only package here that imports verl)."""

from __future__ import annotations

from ...distributed.processes import version
from ..versions import check_version

VERSIONS = ("0.9.0", "0.9.1", "0.10.0")  # 0.10.0: its development versions

# here, so that every plug-in is refused before verl loads a model
check_version("verl", version("verl"), VERSIONS, example="0.9.1")
