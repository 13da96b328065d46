"""`reference_transformers.py` and `tensorflow_fixtures.py` are not ours to import: they need environments of their own."""

collect_ignore = ["reference_transformers.py", "tensorflow_fixtures.py"]
