"""Long work as a list of commands: the code that `realm demo`, `realm compare` and `realm ablate` share.

runner     runs the commands that are not done yet, prints these commands, and records their time and memory
memory     peak memory of a process and its children
"""
