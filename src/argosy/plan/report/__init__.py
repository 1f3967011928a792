"""What `argosy plan` says: the question that a user typed, the plans and their reasons, as text or as a page."""
