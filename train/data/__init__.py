"""Text: corpora, vocabularies, word pieces in files."""
