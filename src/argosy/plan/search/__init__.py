"""The search for the best plan: the space of plans, their costs as columns, and which of them is taken."""
