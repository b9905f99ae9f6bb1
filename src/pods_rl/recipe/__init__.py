"""Recipes: one flat mapping of TRL's own names and ours, checked before torch is loaded."""

from .recipe import Recipe, build_recipe, find_recipe, load_recipe, shipped_recipes
from .schema import explain

__all__ = ["Recipe", "build_recipe", "explain", "find_recipe", "load_recipe", "shipped_recipes"]
