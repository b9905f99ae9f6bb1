"""Checks and estimates before a run starts: batch sizes, memory, compatible settings. No torch."""
