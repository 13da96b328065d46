"""The systems that the paper compares REALM with, behind one interface; `realm baseline` trains them.

system            the interface, the registry, and the folder of a trained system
closed_book       T5: answers from its weights alone
drqa, tfidf       DrQA: a recurrent reader on the best documents of hashed bigrams
graph_retriever   GraphRetriever: a reader with the relations between passages as input
path_retriever    PathRetriever: paths of passages; path_network has its networks
passage_graph     which documents a passage names
articles          the documents of a knowledge base, with their passages
knn_lm            kNN-LM: a datastore of masked-LM states, on masked facts only; `realm knn` runs it, outside the interface
"""
