"""The task of predicting the next token of a text."""
