"""Scores of answers: metrics, the report of an evaluation, intervals and paired tests, and calibrated probabilities."""
