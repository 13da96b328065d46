"""Reads documents from files, and reports which files could not be read and why."""
