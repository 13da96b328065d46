"""The knowledge base on disk: passages, wordpieces and vectors in Lance tables that one process writes at a time."""
