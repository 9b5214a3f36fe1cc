"""Guides, and the tour as a site and as a notebook."""
