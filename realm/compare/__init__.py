"""`realm compare` and `realm ablate`: Table 1 and Table 2 of the REALM paper on one corpus.

rows         definitions of the rows of both tables
plan         the commands that make and measure the rows
results      scores, paired tests and costs, as tables of text
plots        the tables as a picture
table        runs all stages of a table
official     recognises published question sets
"""
