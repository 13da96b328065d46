"""The networks and their losses, the calibration of answers, and the files of a model."""
