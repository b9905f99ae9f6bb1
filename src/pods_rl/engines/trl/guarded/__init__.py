"""What protects a run: checked rewards, limits on tools, skipped updates, exact resume and the run directory."""
