"""What measurements teach the cost model: constants from published runs, factors from finished ones."""
