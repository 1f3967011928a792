"""How replicas agree on a step, where the links between them are thin."""
