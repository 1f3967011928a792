"""Several sites, each a world of its own, that agree on the weights every so many steps."""
