"""Workers that score answers and are killed when they hang: of verifiers, of users' rewards, and forked ones.

`pool` starts workers, asks them and replaces them; `processes` starts and ends them; `scores` says what a score is.
"""
