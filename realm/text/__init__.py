"""Splits documents into passages, with the sentences, names and dates of each passage."""
