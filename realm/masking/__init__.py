"""Masked queries, which are made from sentences, and the candidates of these queries."""
