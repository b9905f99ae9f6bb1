"""Rollouts of any engine: their record, and limits on their tools."""
