"""The knowledge base on disk: Lance tables of passages and vectors, and the files beside them. One process writes at a time."""
