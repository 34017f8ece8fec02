"""Infinity: train models whose parameters, gradients and optimizer state do not fit in memory, exactly."""

__version__ = "0.1.0"
