"""Devices, nodes and networks: the catalogue, cluster files, and the machine at hand."""
