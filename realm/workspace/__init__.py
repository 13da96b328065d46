"""Workspaces. A workspace is a folder with a knowledge base and a model, which `realm fit` makes from documents.

fit         makes or updates a workspace: knowledge base, index, adaptation, comparison with the start model
examples    chooses the questions that show what can be asked
sources     the sources, and which documents came from them
sync        updates the knowledge base, so that it contains the documents of the sources
watch       keeps the knowledge base in step with files until it is stopped
judging     compares the adapted model with the start model
report      report.json, and the test of whether a workspace is up to date
settings    settings of a fit, and default times of a watcher
folder      the Python interface of a workspace: questions and changes
living      snapshots of a knowledge base that changes while questions are answered
"""
