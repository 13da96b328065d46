"""Lance tables with atomic commits, locks on the versions that are read, and checksums of all files."""
