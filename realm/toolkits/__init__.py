"""Components with which other toolkits retrieve passages from a workspace or a server, and extract answers from documents.

langchain    a retriever for LangChain
llama_index  a retriever for LlamaIndex
haystack     a retriever and an extractive reader for Haystack
sources      where the passages come from: a workspace, or a server of `realm serve`
"""
