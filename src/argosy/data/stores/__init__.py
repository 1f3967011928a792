"""Prepared data in an object store: fetched ahead along the known order of samples, into a cache on this machine."""
