"""Search for the best passages of a query: exact inner products, BM25, or a hybrid of both."""
