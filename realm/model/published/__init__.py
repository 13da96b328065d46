"""Checkpoints of others: the REALM models that Google published, as Hugging Face files, in and out.

    checkpoint   a folder or hub repository: which kind it is, its tensors by their published names
    parts        tensors <-> networks; the table of names
    peer         the arithmetic of transformers 4.57.6 where it differs from ours
    export       our model -> folders that transformers 4.57.6 loads

What is not networks, the block records and their vectors, is in `realm.retrieval.published`.
"""
