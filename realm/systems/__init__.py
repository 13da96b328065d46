"""Systems with which the REALM paper compares REALM. They have one interface; `realm baseline` trains these systems.

system            the interface, the list of systems, and the folder of a trained system
closed_book       T5, which answers from its weights alone
drqa, tfidf       DrQA: a recurrent reader, and retrieval of documents by TF-IDF of hashed unigrams and bigrams
graph_retriever   GraphRetriever: a reader whose input includes the relations between passages
path_retriever    PathRetriever: retrieval of paths of passages
path_network      the networks of PathRetriever
passage_graph     the graph of passages for GraphRetriever and PathRetriever
articles          the documents of a knowledge base, with the passages of each document
knn_lm            kNN-LM: a datastore of masked-LM states, which predicts masked words. It does not have the interface of the
                  other systems; `realm knn` runs it
"""
