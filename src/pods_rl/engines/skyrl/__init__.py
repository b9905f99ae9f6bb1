"""The SkyRL engine: PODS as a generator around SkyRL's own (the only package here that imports SkyRL)."""

from __future__ import annotations

from ...distributed.processes import version
from ..versions import check_version

VERSIONS = ("0.3", "0.4")

# here, so that it is refused before SkyRL starts an inference engine
check_version("skyrl", version("skyrl"), VERSIONS, example="0.4.0")
