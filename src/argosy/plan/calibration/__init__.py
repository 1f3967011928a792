"""The cost model's few free numbers, and how they are fitted to published, probed and finished runs."""
