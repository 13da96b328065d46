"""Readers of file formats, and the code that these readers share. A reader makes records from one file, with limited memory."""
