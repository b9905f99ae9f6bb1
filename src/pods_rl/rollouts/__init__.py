"""Cheap rollouts for any engine: each prompt computed once, groups that stop when decided, places of dead groups."""
