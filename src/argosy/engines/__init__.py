"""Engines that a run is launched on: what a cluster has to start, follow and stop it."""
