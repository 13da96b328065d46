"""Readers of Wikipedia's own formats: dumps, ZIM archives, and the output of WikiExtractor."""
