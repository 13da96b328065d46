"""The knowledge base on disk: passages, their wordpieces and their vectors, in Lance tables that one process writes at a time."""
