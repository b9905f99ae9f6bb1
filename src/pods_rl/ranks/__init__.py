"""Several processes of one run: where each stands, and how all of them end when one fails, stalls or is killed."""

from .failure import Failure
from .place import Place, place
from .position import busy, mark
from .watch import watching

__all__ = ["Failure", "Place", "busy", "mark", "place", "watching"]
