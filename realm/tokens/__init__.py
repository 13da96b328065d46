"""The tokenizer, which makes wordpieces from text, and the layouts of wordpieces as inputs of networks."""
