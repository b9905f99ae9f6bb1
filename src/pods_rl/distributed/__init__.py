"""Several processes of one run: where each stands, and how all of them end when one fails, stalls or is killed."""

from .failure import Failure
from .heartbeat import busy, mark
from .processes import get_rank, get_world_size, is_launched
from .watch import watching

__all__ = ["Failure", "busy", "get_rank", "get_world_size", "is_launched", "mark", "watching"]
