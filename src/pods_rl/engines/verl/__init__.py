"""The verl engine: PODS as plug-ins of verl's trainer (the only room that imports verl).

Names are loaded on first use: `settings` and `groups` need no verl.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .agent_loop import PODSAgentLoopManager
    from .replay_buffer import PODSReplayBuffer, PODSReplayBufferAsync
    from .settings import PODSSettings

_HOME = {
    "PODSAgentLoopManager": ".agent_loop",
    "PODSReplayBuffer": ".replay_buffer",
    "PODSReplayBufferAsync": ".replay_buffer",
    "PODSSettings": ".settings",
}

__all__ = ["PODSAgentLoopManager", "PODSReplayBuffer", "PODSReplayBufferAsync", "PODSSettings"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
