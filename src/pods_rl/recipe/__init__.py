"""Recipes: one flat mapping of TRL's own names and ours, checked before torch is loaded."""

from ..yaml_files import Origin
from .catalog import (
    accelerate_configs,
    accelerate_processes,
    check_accelerate,
    find_accelerate_config,
    find_recipe,
    shipped_arms,
    shipped_recipes,
)
from .recipe import Recipe, build_recipe, load_recipe
from .schema import explain

__all__ = [
    "Origin",
    "Recipe",
    "accelerate_configs",
    "accelerate_processes",
    "build_recipe",
    "check_accelerate",
    "explain",
    "find_accelerate_config",
    "find_recipe",
    "load_recipe",
    "shipped_arms",
    "shipped_recipes",
]
