"""Experiments: arms x seeds under one wall-clock budget, resumable."""

from .plan import Experiment, Planned, build_experiment, load_experiment
from .running import Event, run_experiment

__all__ = ["Event", "Experiment", "Planned", "build_experiment", "load_experiment", "run_experiment"]
