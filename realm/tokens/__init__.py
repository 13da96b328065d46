"""Text becomes wordpieces, and wordpieces become the inputs of networks."""
