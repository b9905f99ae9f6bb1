"""What needs verl is collected where verl is: `make test-verl`, an environment of its own."""

from importlib.util import find_spec

ENGINE = "src/pods_rl/engines/verl"
collect_ignore = (
    [] if find_spec("verl") else ["tests/verl", *(f"{ENGINE}/{name}.py" for name in ("agent_loop", "replay_buffer"))]
)
