"""Before a run starts: batch sizes, memory, compatible settings, and plans. No torch, except in `signal` and `plan`."""
