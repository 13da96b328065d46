"""REALM: a retriever and a reader that learn from unlabelled text, then answer questions with evidence."""

__version__ = "0.1.0"
