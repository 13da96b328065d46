"""Readers of file formats. A reader makes records from one file, with a limited amount of memory."""
