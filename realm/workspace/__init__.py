"""A workspace: a folder made from documents by one command, that answers questions about them.

fit         documents -> a workspace: knowledge base, index, adaptation, judgement; goes on and follows
judging     whether an adapted model finds more than its start
report      what a fit found, and whether anything is left to do
settings    of a fit
folder      a workspace that is open for questions and changes
living      its snapshots, and how a change makes the next one
"""
