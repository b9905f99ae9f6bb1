"""The tree of the prefixes of a prompt's rollouts: each distinct prefix is computed once, in generation and update."""
