"""`realm compare` and `realm ablate`: the paper's Table 1 and Table 2 on one corpus, and the systems that they compare.

rows         the rows of both tables, as data
plan         the commands that make and measure the rows
results      scores, paired tests and costs; the tables
plots        the tables as a picture
table        runs all stages of a table
system       the interface of a system that `realm baseline` trains, and its folder
drqa, ...    one system per file
"""
