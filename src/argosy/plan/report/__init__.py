"""The report of `argosy plan`: the user's request, the plans and their reasons, as text or as a page."""
