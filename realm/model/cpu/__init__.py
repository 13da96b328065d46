"""The transformer layers as a CPU computes them fastest: packed rows, attention, dropout, threads."""
