"""Where workers run: one program, started a number of times on this machine or on those of a cluster."""
