"""`python -m train.launch`: a command in several processes."""
