"""Sweeps: many runs that differ in some keys, and which of them was best."""
