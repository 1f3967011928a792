"""The reference pages of the site, written from the code at each build."""
