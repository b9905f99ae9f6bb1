"""Generate n rollouts of each prompt and keep m of them: PODS itself."""
