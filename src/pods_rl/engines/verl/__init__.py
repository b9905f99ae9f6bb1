"""The verl engine: PODS as plug-ins of verl's trainer (the only package here that imports verl)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "PODSAgentLoopManager": "agent_loop",
    "PODSReplayBuffer": "replay_buffer",
    "PODSReplayBufferAsync": "replay_buffer",
    "PODSSettings": "settings",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Load a class on first use: `settings` and `groups` need no verl."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
