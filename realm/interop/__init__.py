"""Imports and exports checkpoints: REALM by Google and Hugging Face, question-answering BERTs, sentence-transformers.

span_readers   imports question-answering BERTs as span readers
checkpoint     opens a folder or hub repository: the kind of the checkpoint, and its tensors by their Hugging Face names
google         the names and settings of Google's checkpoints
tensorflow     reads the tensors of a TensorFlow checkpoint without TensorFlow
weight_names   converts tensors to networks and back; has the table of names
export         writes a model as folders that transformers 4.57.6 loads
blocks         converts the passages of an open-QA checkpoint and their vectors
block_records  reads and writes the file with the texts of these passages
uploading      uploads models and workspaces to the Hugging Face hub
sharing        writes a folder for the hub, and a model card
as_sentence_transformers   writes the embedder as a sentence-transformers model
object_storage/            copies folders to object storage and back
"""
