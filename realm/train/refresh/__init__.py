"""The index is rebuilt by another process while training goes on."""
