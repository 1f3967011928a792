"""All plans that are worth a look, priced as columns, and which of them is taken."""
