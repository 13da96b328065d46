"""Documents become passages with their sentences, names and dates."""
