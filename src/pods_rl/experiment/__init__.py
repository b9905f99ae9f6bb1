"""Experiments: arms x seeds under one wall-clock budget, resumable."""

from .plan import Experiment, Planned, build_experiment, load_experiment
from .process import Job
from .run_progress import Standing, standing
from .running import Event, run_experiment

__all__ = [
    "Event",
    "Experiment",
    "Job",
    "Planned",
    "Standing",
    "build_experiment",
    "load_experiment",
    "run_experiment",
    "standing",
]
