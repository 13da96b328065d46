"""Answers to questions and words for masked sentences, and how both are scored."""
