"""The vectors of all passages under one embedder: how they are computed, and the versions in which they are published."""
