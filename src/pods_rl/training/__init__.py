"""One training run: from a recipe to a run directory, its recorder, its display, and where it resumes."""
