"""The task of pre-training a BERT on text."""
