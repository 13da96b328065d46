"""Measures of rankings of documents, and the comparison of two models on the same questions.

collection   reads test collections in the format of BEIR: queries, and the documents that were judged for each query
runs         reads and writes rankings in the format of TREC
ranking      ranks documents for the queries of a collection, and computes nDCG@10, recall@100 and MRR@10
paired       compares two models on the same questions or queries by paired tests
"""
