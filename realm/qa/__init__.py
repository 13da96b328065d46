"""Answers questions, fills masked sentences, and scores both."""
