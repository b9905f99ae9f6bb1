"""Experiments: arms x seeds under one wall-clock budget, resumable."""

from .plan import Experiment, PlannedRun, build_experiment, load_experiment
from .process import Job
from .running import Event, run_experiment

__all__ = ["Event", "Experiment", "Job", "PlannedRun", "build_experiment", "load_experiment", "run_experiment"]
