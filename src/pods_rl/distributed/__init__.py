"""Several processes of one run: where each stands, and how all of them end when one fails, stalls or is killed."""

from .failure import Failure
from .heartbeat import busy, mark
from .processes import Place, place
from .watch import watching

__all__ = ["Failure", "Place", "busy", "mark", "place", "watching"]
