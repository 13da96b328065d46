"""Rebuilds the index during training: in another process, between two steps, or from cached passage states.

refresher        decides when a build starts, and when a new version is used
build_process    starts and monitors the process of a build, and starts a failed build again
cached_states    caches the pooled states of passages if the passage encoder is frozen
"""
