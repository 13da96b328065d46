"""The stages of training, each on the same loop."""
