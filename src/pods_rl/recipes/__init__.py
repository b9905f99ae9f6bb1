"""Recipes shipped with the package, by engine: plain YAML, listed by `pods recipes`."""
