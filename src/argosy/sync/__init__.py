"""Agreement of replicas where the links between them are thin."""
