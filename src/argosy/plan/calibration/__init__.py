"""Calibration by measurements: constants from published runs, factors from finished ones."""
