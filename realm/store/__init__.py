"""The knowledge base on disk: passages, wordpieces and vectors in Lance tables. Only one process writes at a time."""
