"""Readers of the formats in which Wikipedia is distributed: dumps, ZIM archives, and the output of WikiExtractor."""
