"""Processes that score answers and are killed when they hang: of verifiers, of users' rewards, and forked ones.

`pool` starts workers, asks them and replaces them; `serve` is what a worker runs; `processes` starts and ends both.
"""
