"""Checkpoints in and out: REALM in the formats of Google and Hugging Face, question-answering BERTs, sentence-transformers.

span_readers   question-answering BERTs as span readers
checkpoint     a folder or hub repository: its kind, its tensors by their Hugging Face names
google         Google's checkpoints: names and settings
tensorflow     the tensors of a TensorFlow checkpoint, without TensorFlow
parts          tensors <-> networks; the table of names
export         a model -> folders that transformers 4.57.6 loads
blocks         the passages of an open-QA checkpoint and their vectors, from block_records
sharing        sharing models: a folder for the hub, sentence-transformers, a model card
"""
