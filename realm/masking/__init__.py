"""Masked sentences as queries, and which passages are candidates for them."""
