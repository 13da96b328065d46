"""Scores of answers: metrics, the report of an evaluation, intervals, paired tests, calibrated probabilities, and tables."""
