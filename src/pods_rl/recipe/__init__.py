"""Recipes: one flat mapping of TRL's own names and ours, checked before torch is loaded."""

from .catalog import (
    accelerate_configs,
    accelerate_processes,
    find_accelerate_config,
    find_recipe,
    shipped_arms,
    shipped_recipes,
)
from .layouts import Layout, accelerate_layout, check_layout
from .recipe import Recipe, build_recipe, load_recipe
from .schema import explain

__all__ = [
    "Layout",
    "Recipe",
    "accelerate_configs",
    "accelerate_layout",
    "accelerate_processes",
    "build_recipe",
    "check_layout",
    "explain",
    "find_accelerate_config",
    "find_recipe",
    "load_recipe",
    "shipped_arms",
    "shipped_recipes",
]
