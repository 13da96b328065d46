"""Checkpoints of others: the REALM models that Google published, as Hugging Face files in and out, and as its own files in;
and readers that others fine-tuned.

    span_readers   a BERT that answers questions about a text, as a span reader
    checkpoint     a folder or hub repository: which kind it is, its tensors by their published names
    google         Google's names and settings as published ones
    tensorflow     the tensors of a TensorFlow checkpoint, without TensorFlow
    parts          tensors <-> networks; the table of names
    export         our model -> folders that transformers 4.57.6 loads
    blocks         the passages of an open-QA checkpoint and their vectors, from block_records
    sharing        our model for others: a compact folder, sentence-transformers, a card
"""
