"""The index during training: built again by another process or between two steps, or computed from cached passage states.

refresher        when a build starts, and when a new version is used
build_process    the process of a build: starts, failures, restarts
cached_states    states of passages whose encoder does not train
"""
