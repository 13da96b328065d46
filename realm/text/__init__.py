"""Files become documents, and documents become passages with their sentences, names and dates."""
