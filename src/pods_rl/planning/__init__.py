"""The arithmetic of a run before it starts: batches, memory, and which settings go together. No torch."""
