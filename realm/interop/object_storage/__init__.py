"""Copies of knowledge bases, models and workspaces on object storage: `realm push` and `realm pull`.

copying    uploads and downloads
listing    the list of the files of a copy
folder     the folder on this machine: which of its files are copied, and whether they were changed
"""
