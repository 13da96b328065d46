"""The networks, their losses, and their files."""
