"""`realm compare` and `realm ablate`: the paper's Table 1 and Table 2 on one corpus.

rows         the rows of both tables, as data
plan         the commands that make and measure the rows
results      scores, paired tests and costs; the tables
plots        the tables as a picture
table        runs all stages of a table
official     recognises published question sets
"""
