"""Several processes of one run: their ranks, the progress of each, and a common end if one fails."""

from .heartbeat import Failure, busy, mark
from .processes import get_rank, get_world_size, is_launched
from .watch import watching

__all__ = ["Failure", "busy", "get_rank", "get_world_size", "is_launched", "mark", "watching"]
