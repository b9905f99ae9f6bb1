"""`pods plan`: what a step costs with other numbers of prompts and rollouts, measured."""
