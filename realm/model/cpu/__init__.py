"""Transformer layers for CPUs: packed rows, attention, dropout, threads."""
