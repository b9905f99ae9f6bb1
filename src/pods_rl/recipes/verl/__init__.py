"""Configuration and launch script for verl, as a package because Hydra finds configurations in packages."""
