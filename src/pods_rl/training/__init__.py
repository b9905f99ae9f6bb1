"""One training run: the run itself, its recorder, what a person sees of it, and where it resumes."""
