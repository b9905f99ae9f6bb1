"""Several processes of one run: their ranks, values exchanged between them, signals, and their launcher."""

from .processes import get_rank, get_world_size, is_launched

__all__ = ["get_rank", "get_world_size", "is_launched"]
