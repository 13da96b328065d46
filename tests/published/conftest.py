"""`peer.py` is not ours to import: it needs the peer's environment."""

collect_ignore = ["peer.py"]
