"""Fields of documents in the table of passages: the typed columns, and the filters over these columns."""
