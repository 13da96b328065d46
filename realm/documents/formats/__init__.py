"""Readers of file formats: each makes records of one file, and a limit bounds what it takes into memory."""
