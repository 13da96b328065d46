"""Long work as a list of commands: what `realm demo`, `realm compare` and `realm ablate` share.

runner     runs the commands that are not done yet, prints them, records their time and memory
memory     peak memory of a process and its children
tables     tables, paragraphs and costs as plain text
"""
