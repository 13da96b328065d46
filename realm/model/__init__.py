"""The networks, and the losses and the files of the networks."""
