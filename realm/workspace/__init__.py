"""A workspace: a folder that one command makes from documents, and that answers questions about them.

fit         makes or updates a workspace: knowledge base, index, adaptation, comparison with the start model
sync        makes the knowledge base hold the documents of the sources
judging     compares the adapted model with the start model
report      report.json, and whether a fit has anything left to do
settings    settings of a fit
folder      an open workspace: questions and changes, from Python
living      snapshots of a knowledge base that changes while it answers
"""
