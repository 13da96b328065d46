"""The best passages for a query: by vectors exactly, by words with BM25, or by both."""
