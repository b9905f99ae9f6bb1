"""A policy and its tokenizer from their files, and a task as that policy reads it: for training and for evaluation."""
