"""Indexes: computes the vectors of all passages with one embedder, and publishes versions of these vectors."""
