"""Experiments: arms x seeds under one wall-clock budget, resumable."""

from .plan import Experiment, PlannedRun, build_experiment, load_experiment
from .running import Event, Job, run_experiment

__all__ = ["Event", "Experiment", "Job", "PlannedRun", "build_experiment", "load_experiment", "run_experiment"]
