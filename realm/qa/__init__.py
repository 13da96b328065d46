"""Answers questions, predicts masked words, and scores answers and predictions."""
