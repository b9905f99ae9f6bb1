"""The cheaper step: each distinct prefix is computed once, in generation and in the update."""
