"""`realm compare` and `realm ablate`: Table 1 and Table 2 of the REALM paper on one corpus.

rows         definitions of the rows of both tables
plan         what a table has, and the paths of its files
commands     the commands that make and measure the rows
questions    reads the questions, and splits them into training and dev questions
results      scores, paired tests and costs
layout       the tables as text
checks       compares a table with an earlier report, and two rows with each other
plots        the tables as a picture
table        runs all stages of a table
official     recognises published question sets
"""
