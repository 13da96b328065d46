"""`realm demo`: stories told in the commands that anyone could type, on corpora that come with packages.

from_text/  the story from plain text alone: a retriever and a reader trained on nothing else
telling     runs the stages whose product is missing, says why, keeps what each cost
tables      of plain text
memory      how much of it all this took
"""
