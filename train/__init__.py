"""The application: a small BERT pre-trained by workers that exchange one bit."""
