"""Recipes: one flat mapping of TRL's own names and ours, checked before torch is loaded."""

from ..yaml_files import Origin
from .catalog import find_accelerate_config, find_recipe, shipped_arms, shipped_recipes
from .recipe import Recipe, build_recipe, load_recipe

__all__ = [
    "Origin",
    "Recipe",
    "build_recipe",
    "find_accelerate_config",
    "find_recipe",
    "load_recipe",
    "shipped_arms",
    "shipped_recipes",
]
