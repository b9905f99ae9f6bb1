"""Processes that can be killed: `pool` starts and asks them, `worker` is their side, `scores` what they return."""
