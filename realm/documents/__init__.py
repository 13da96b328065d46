"""Files become documents: which reader reads a file, and what could not be read and why."""
